"""`oneOf` whose parts share no value. Such a `oneOf` is an `anyOf`, which llguidance supports for any parts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import combinations, product
from typing import Any

from specdec.grammar.json_schema.rewriter import Rewriter, place_of_target
from specdec.grammar.json_schema.schemas import Schema
from specdec.grammar.json_schema.shapes import TYPES
from specdec.grammar.json_schema.values import are_texts, is_number, list_of, object_of

MAX_DEPTH = 8
"""Maximum nesting of references and combinations that are followed within a part."""

MAX_PROPERTY_DEPTH = 3
"""Maximum nesting of the properties that are compared."""

MAX_WAYS = 16
"""Maximum alternatives within a part that are compared one by one."""

Listed = frozenset[Any] | None
"""The values of one type that a schema allows; None for all of them."""


@dataclass(frozen=True)
class _Values:
    """An upper bound on the values that a schema allows."""

    types: Mapping[str, Listed]  # integers are numbers
    properties: Mapping[str, Sequence[tuple[Schema, str]]] = field(default_factory=dict)  # with their places
    required: frozenset[str] = frozenset()
    closed: tuple[Collection[str], ...] = ()  # each excludes all other names
    ways: tuple[_Values, ...] = ()  # alternatives for objects, if they are known

    def __and__(self, other: _Values) -> _Values:
        names = [*self.properties, *(name for name in other.properties if name not in self.properties)]
        several = (self.ways or other.ways) and len(self.of_objects) * len(other.of_objects) <= MAX_WAYS
        return _Values(
            {kind: _both(listed, other.types[kind]) for kind, listed in self.types.items() if kind in other.types},
            {name: [*self.properties.get(name, ()), *other.properties.get(name, ())] for name in names},
            self.required | other.required,
            self.closed + other.closed,
            tuple(one & two for one in self.of_objects for two in other.of_objects) if several else (),
        )

    def __or__(self, other: _Values) -> _Values:
        types = {kind: _either(self.types, other.types, kind) for kind in {**self.types, **other.types}}
        ways = [way for found in (self, other) if "object" in found.types for way in found.of_objects]
        if len(ways) == 1:
            return replace(ways[0], types=types)
        known = tuple(ways) if len(ways) <= MAX_WAYS else ()
        return _Values(types, required=self.required & other.required, ways=known)

    @property
    def of_objects(self) -> tuple[_Values, ...]:
        return self.ways or (self,)

    @property
    def is_listed(self) -> bool:
        return None not in self.types.values()

    def excludes(self, name: str) -> bool:
        """Return whether no object has this property."""
        return any(name not in names for names in self.closed)


ANY = _Values({kind: None for kind in TYPES if kind != "integer"})
NOTHING = _Values({})


def distinguishing(rewriter: Rewriter, parts: Sequence[Schema], place: str, whole: Mapping[str, Any]) -> str | None:
    """Return the property whose presence in an object makes certain that no value matches two of these parts of a whole
    schema; "" if this is certain without it, and None if it is not certain.

    Schema generators do not list a discriminator as required if it has a default, although it is always serialised."""
    beside = _values(rewriter, {key: value for key, value in whole.items() if key != "oneOf"}, place)
    found = (_values(rewriter, part, f"{place}/{n}") for n, part in enumerate(parts))
    return _distinguishing(rewriter, [beside & values for values in found], 0)


def _distinguishing(rewriter: Rewriter, parts: Sequence[_Values], depth: int) -> str | None:
    needed = ""
    for kind in ANY.types:
        allowing = [part for part in parts if kind in part.types]
        listed = [values for part in allowing if (values := part.types[kind]) is not None]
        if len(allowing) < 2:
            continue
        if len(listed) == len(allowing) and len(frozenset[Any]().union(*listed)) == sum(map(len, listed)):
            continue
        found = _property(rewriter, allowing, depth) if kind == "object" else None
        if found is None:
            return None
        needed = found
    return needed


def _property(rewriter: Rewriter, objects: Sequence[_Values], depth: int) -> str | None:
    """Return the property that distinguishes objects; "" if they are distinguished by properties that they require."""
    if depth >= MAX_PROPERTY_DEPTH:
        return None
    if _are_apart(rewriter, objects, depth):
        return ""
    for name in objects[0].properties:
        values = list(_listed_of(rewriter, objects, name))
        if len(values) == len(objects) and _distinguishing(rewriter, values, depth + 1) == "":
            return name
    rewriter.count("", sum(len(found.of_objects) for found in objects) ** 2)
    pairs = (ways for pair in combinations(objects, 2) for ways in product(*(found.of_objects for found in pair)))
    return "" if all(_are_apart(rewriter, pair, depth) for pair in pairs) else None


def _are_apart(rewriter: Rewriter, objects: Sequence[_Values], depth: int) -> bool:
    """Return whether a property that all objects but one require distinguishes them."""
    needed = Counter(name for found in objects for name in found.required)
    names = [name for name, number in needed.items() if number >= len(objects) - 1]
    if len(objects) == 2 and any(found.excludes(name) for name in names for found in objects):
        return True
    for name in names:
        values = [_of_property(rewriter, found, name) for found in objects]
        if _distinguishing(rewriter, values, depth + 1) == "":
            return True
    return False


def _listed_of(rewriter: Rewriter, objects: Sequence[_Values], name: str) -> Iterator[_Values]:
    """Yield the values of a property in these objects, up to the first that does not list or even excludes them."""
    for found in objects:
        values = _of_property(rewriter, found, name)
        if not values.is_listed or not values.types:  # an object without this property would be lost
            return
        yield values


def _of_property(rewriter: Rewriter, objects: _Values, name: str) -> _Values:
    if objects.excludes(name):
        return NOTHING
    schemas = objects.properties.get(name, ())
    return reduce(_Values.__and__, (_values(rewriter, schema, place) for schema, place in schemas), ANY)


def _values(rewriter: Rewriter, schema: Schema, place: str, depth: int = 0) -> _Values:
    """Return an upper bound on a schema's values; keywords that are not read only narrow them."""
    rewriter.count(place)
    if not isinstance(schema, dict) or depth > MAX_DEPTH:
        return NOTHING if schema is False else ANY
    values = _listed(schema)
    rewriter.count(place, len(values or ()))
    found = _Values(
        _types(schema),
        {name: [(inner, place)] for name, inner in object_of(schema.get("properties")).items()},
        frozenset(filter(_is_text, list_of(schema.get("required")))),
        (object_of(schema.get("properties")),) if _is_closed(schema) else (),
    )
    if values is not None:
        found &= _Values(_by_type(values))
    if "$ref" in schema:
        target = rewriter.document.resolved(schema, f"{place}/$ref")
        found &= _values(rewriter, target, place_of_target(schema), depth + 1)
    for n, part in enumerate(list_of(schema.get("allOf"))):
        found &= _values(rewriter, part, f"{place}/allOf/{n}", depth + 1)
    for key in ("anyOf", "oneOf"):
        if parts := list_of(schema.get(key)):
            ways = (_values(rewriter, part, f"{place}/{key}/{n}", depth + 1) for n, part in enumerate(parts))
            found &= reduce(_Values.__or__, ways)
    return found


def _is_closed(schema: Mapping[str, Any]) -> bool:
    return schema.get("additionalProperties") is False and not schema.get("patternProperties")


def _types(schema: Mapping[str, Any]) -> Mapping[str, Listed]:
    given = schema.get("type")
    names = [given] if isinstance(given, str) else given
    if not isinstance(names, list) or not are_texts(names):
        return ANY.types
    return dict.fromkeys("number" if name == "integer" else name for name in names)


def _listed(schema: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the values that a schema lists; None if it lists none."""
    if "const" in schema:
        return [schema["const"]]
    return schema["enum"] if isinstance(schema.get("enum"), list) else None


def _by_type(values: Sequence[Any]) -> Mapping[str, Listed]:
    """Return listed values by their type. Arrays and objects are not compared."""
    found = dict[str, list[Any]]()
    for value in values:
        found.setdefault(_type_of(value), []).append(value)
    return {kind: None if kind in ("array", "object") else frozenset(same) for kind, same in found.items()}


def _type_of(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if is_number(value):
        return "number"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _both(first: Listed, second: Listed) -> Listed:
    return second if first is None else first if second is None else first & second


def _either(first: Mapping[str, Listed], second: Mapping[str, Listed], kind: str) -> Listed:
    one, other = first.get(kind, frozenset[Any]()), second.get(kind, frozenset[Any]())
    return None if one is None or other is None else one | other
