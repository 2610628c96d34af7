"""The check of finished texts, for keywords that no grammar enforces: `uniqueItems` of unlisted values, and
`minProperties` of objects whose names may repeat or are optional. A grammar cannot remember all items or names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any, NamedTuple

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.references import Document
from specdec.grammar.json_schema.schemas import Schema
from specdec.grammar.json_schema.values import list_of, object_of

Select = Callable[[Any], Iterable[tuple[str, Any]]]
"""Returns (JSON pointer, part) for each part of a value that a subschema applies to."""

KEYWORDS = ("minProperties", "uniqueItems")
"""Keywords that may be left to the check."""

MAX_CHARACTERS = 1 << 18
"""Maximum characters of a checked text: parsing takes some 10 ms."""

MAX_WORK, VISIT_WORK, ITEM_WORK = 500_000, 100, 30
"""Limit on the work of a check, some 10 ms, since it runs on the event loop. Each visited value costs 100, each
compared item 30 plus its number of characters."""

CONTAINERS = frozenset(["array", "object"])
"""Types of values that the check looks into."""

DEFINITIONS = frozenset(["$defs", "definitions"])
"""Keywords with schemas that apply only where they are referred to."""


class TextVerdict(NamedTuple):
    """The outcome of a check."""

    ok: bool | None  # None: no complete JSON value, or too large to check
    path: str = ""  # JSON pointer to the invalid value
    keyword: str = ""  # the violated keyword


class _Path(NamedTuple):
    """The path to a value, as its last part and the path before it: a copy for each item of a long path would take
    gigabytes."""

    last: str
    before: _Path | None

    def pointer(self) -> str:
        parts, path = list[str](), self
        while path.before is not None:
            parts.append(path.last)
            path = path.before
        return "".join(reversed(parts))


class TextCheck:
    """The check of a text for the parts of its schema that its grammar does not enforce. The other parts already
    hold."""

    def __init__(self, root: Mapping[str, Any], document: Document, unenforced: Mapping[tuple[int, str], str]) -> None:
        """`unenforced`: places of the keywords that are left to the check, by the identity of their schema in
        `document` and the keyword. GrammarError unless types alone decide whether each of these schemas applies."""
        self._root = root
        self._document = document
        self._unenforced = frozenset(unenforced)
        steps, uncertain = self._reached()
        for (schema, keyword), place in unenforced.items():
            if schema in uncertain or schema not in steps:
                why = "alternatives other than types decide whether it applies"
                raise GrammarError(f"{place}/{keyword}: cannot be enforced: {why}")
        self._steps = _leading_to({schema for schema, _ in unenforced}, steps)

    def of_text(self, text: str) -> TextVerdict:
        """Check a text that matches the grammar."""
        if len(text) > MAX_CHARACTERS:
            return TextVerdict(None)
        try:
            return self._of_value(json.loads(text, parse_float=_number))
        except (ValueError, RecursionError):
            return TextVerdict(None)

    def _of_value(self, value: Any) -> TextVerdict:
        left, ahead = MAX_WORK, [(self._root, value, _Path("", None))]
        while ahead:
            schema, value, path = ahead.pop()
            left -= VISIT_WORK
            counts = (id(schema), "minProperties") in self._unenforced and isinstance(value, dict)
            if counts and len(value) < schema["minProperties"]:
                return TextVerdict(False, path.pointer(), "minProperties")
            if (id(schema), "uniqueItems") in self._unenforced and isinstance(value, list):
                known = set[str]()
                for number, item in enumerate(value):
                    spelled = json.dumps(item, sort_keys=True)
                    left -= ITEM_WORK + len(spelled)
                    if spelled in known:
                        return TextVerdict(False, f"{path.pointer()}/{number}", "uniqueItems")
                    if left < 0:
                        break
                    known.add(spelled)
            if left < 0:
                return TextVerdict(None)
            parts = (
                (inner, part, _Path(place, path) if place else path)
                for select, inner in self._steps.get(id(schema), ())
                for place, part in select(value)
            )
            ahead += islice(parts, left // VISIT_WORK + 1)  # exceeding the work budget ends without a verdict
        return TextVerdict(True)

    def _reached(self) -> tuple[dict[int, list[tuple[Select, Schema]]], set[int]]:
        """Return (steps, uncertain). `steps`: by schema id, the steps from each schema that certainly applies.
        `uncertain`: ids of schemas that are reached in other ways, too."""
        steps: dict[int, list[tuple[Select, Schema]]] = {}
        others, ahead = list[Any](), [self._root]
        while ahead:
            schema = ahead.pop()
            if not isinstance(schema, dict) or id(schema) in steps:
                continue
            steps[id(schema)] = own = list(self._steps_from(schema, others))
            ahead += [inner for _, inner in own]
        uncertain = set[int]()
        while others:
            found = others.pop()
            if not isinstance(found, dict | list) or id(found) in uncertain:
                continue
            uncertain.add(id(found))
            others += found.values() if isinstance(found, dict) else found
            if isinstance(found, dict) and isinstance(found.get("$ref"), str):
                with suppress(GrammarError):
                    others.append(self._document.resolved(found, ""))
        return steps, uncertain

    def _steps_from(self, schema: Mapping[str, Any], others: list[Any]) -> Iterator[tuple[Select, Schema]]:
        """Yield the steps to the subschemas that certainly apply to a part of the value; append the rest of the schema
        to `others`."""
        certain = {*DEFINITIONS, "allOf", "$ref", "properties", "prefixItems", "items"}
        yield from ((_itself, part) for part in list_of(schema.get("allOf")))
        if "$ref" in schema:
            yield _itself, self._document.resolved(schema, "/$ref")
        for key in ("anyOf", "oneOf"):
            parts = list_of(schema.get(key))
            types = [self._containers(part) for part in parts]
            if all(sum(kind in of_part for of_part in types) <= 1 for kind in CONTAINERS):
                certain.add(key)
                yield from ((_of_types(of_part), part) for of_part, part in zip(types, parts, strict=True))
        properties = object_of(schema.get("properties"))
        yield from ((_property(name), inner) for name, inner in properties.items())
        if "additionalProperties" in schema and "patternProperties" not in schema:
            certain.add("additionalProperties")
            yield _properties_but(properties.keys()), schema["additionalProperties"]
        prefix, items = list_of(schema.get("prefixItems")), schema.get("items")
        if isinstance(items, list):  # before draft 2020-12
            prefix, items = items, schema.get("additionalItems")
            certain.add("additionalItems")
        yield from ((_items(number, number + 1), inner) for number, inner in enumerate(prefix))
        if items is not None:
            yield _items(len(prefix), None), items
        others += [value for key, value in schema.items() if key not in certain]

    def _containers(self, schema: Schema) -> frozenset[str]:
        """Return the container types that a schema may allow."""
        found = schema
        for found in self._document.chain(schema, "/$ref"):
            if not isinstance(found, dict) or "type" in found:
                break
        if not isinstance(found, dict):
            return CONTAINERS if found is True else frozenset()
        kinds = found.get("type", list(CONTAINERS))
        return CONTAINERS.intersection(map(str, kinds if isinstance(kinds, list) else [kinds]))


def _leading_to(
    targets: set[int], steps: Mapping[int, list[tuple[Select, Schema]]]
) -> dict[int, list[tuple[Select, Schema]]]:
    """Return the steps that lead to one of these schemas; the others need no visit."""
    before: dict[int, list[int]] = {}
    for schema, own in steps.items():
        for _, inner in own:
            before.setdefault(id(inner), []).append(schema)
    leading, ahead = set(targets), list(targets)
    while ahead:
        for schema in before.get(ahead.pop(), ()):
            if schema not in leading:
                leading.add(schema)
                ahead.append(schema)
    return {schema: [step for step in own if id(step[1]) in leading] for schema, own in steps.items()}


def _number(text: str) -> float | int:
    """Return a number as JSON Schema compares it: 1.0 equals 1."""
    number = float(text)
    return int(number) if number.is_integer() else number


def _itself(value: Any) -> Iterable[tuple[str, Any]]:
    return [("", value)]


def _of_types(types: frozenset[str]) -> Select:
    return lambda value: [("", value)] if ("array" if isinstance(value, list) else "object") in types else []


def _place(key: str) -> str:
    return "/" + key.replace("~", "~0").replace("/", "~1")


def _property(name: str) -> Select:
    place = _place(name)
    return lambda value: [(place, value[name])] if isinstance(value, dict) and name in value else []


def _properties_but(names: Iterable[str]) -> Select:
    known = frozenset(names)
    return lambda value: ((_place(key), part) for key, part in object_of(value).items() if key not in known)


def _items(begin: int, end: int | None) -> Select:
    return lambda value: ((f"/{number}", part) for number, part in enumerate(list_of(value)[begin:end], begin))
