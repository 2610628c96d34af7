"""Objects: properties by name and by pattern, additional properties, and dependencies between properties."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import NamedTuple

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.property_names import rewrite_property_names
from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter, place_of_target, refused
from specdec.grammar.json_schema.schemas import Schema, both
from specdec.grammar.json_schema.spelled_names import CONTROL
from specdec.grammar.json_schema.strings import name_pattern
from specdec.grammar.json_schema.values import are_objects, are_texts, list_of, object_of, pointer_part

DECIDING = frozenset(
    ["anyOf", "dependencies", "dependentRequired", "dependentSchemas", "else", "if", "not", "oneOf", "then"]
)
"""Keywords that may require or exclude properties for some objects."""


def rewrite_object(rewriter: Rewriter, part: Rewrite) -> None:
    source, place, keywords = part.source, part.place, part.keywords
    keywords.update({key: source[key] for key in ("properties", "patternProperties") if key in source})
    if isinstance(properties := source.get("properties"), dict):
        keywords["properties"] = {
            name: rewriter.schema(inner, f"{place}/properties/{pointer_part(name)}")
            for name, inner in properties.items()
        }
    if isinstance(patterns := source.get("patternProperties"), dict):
        keywords["patternProperties"] = {}
        for name, inner in patterns.items():
            key = name_pattern(rewriter, name, f"{place}/patternProperties")
            value = rewriter.schema(inner, f"{place}/patternProperties/{pointer_part(name)}")
            keywords["patternProperties"][key] = both(keywords["patternProperties"].get(key, True), value)
    named = are_objects(keywords, "properties", "patternProperties")
    if "additionalProperties" in source:
        additional = rewriter.schema(source["additionalProperties"], f"{place}/additionalProperties")
        keywords["additionalProperties"] = additional
    elif "unevaluatedProperties" in source and named:
        _rewrite_unevaluated(rewriter, part)
    if "propertyNames" in source and named:
        rewrite_property_names(rewriter, part)
    for key in ("dependencies", "dependentRequired", "dependentSchemas"):
        _rewrite_dependencies(rewriter, part, key)
    _check_minimum(rewriter, part)
    _check_maximum(rewriter, part)


class _Names(NamedTuple):
    """The names that an object may or must have by a schema, and by those that always apply with it."""

    properties: set[str]
    required: set[str]
    patterns: bool
    closed: bool  # without names other than `properties`

    @property
    def optional(self) -> set[str]:
        return self.properties - self.required


def _names(rewriter: Rewriter, part: Rewrite) -> _Names:
    properties, required, patterns, closed = set[str](), set[str](), False, False
    for schema in (part.keywords, *_applying(rewriter, part.source, part.place)):
        required |= {name for name in list_of(schema.get("required")) if isinstance(name, str)}
        properties |= object_of(schema.get("properties")).keys()
        patterns |= bool(named := object_of(schema.get("patternProperties")))
        closed |= schema.get("additionalProperties") is False and not named
    return _Names(properties, required, patterns, closed)


def _check_minimum(rewriter: Rewriter, part: Rewrite) -> None:
    """Drop `minProperties` if the required properties suffice. Leave it to the check where the grammar would count a
    repeated name twice, and beside optional properties, where llguidance refuses it; GrammarError without a check."""
    source, place = part.source, part.place
    if "minProperties" not in source or "object" not in source.get("type", "object"):
        part.keywords.pop("minProperties", None)
        return
    names = _names(rewriter, part)
    required, least = names.required, source["minProperties"]
    # Without properties or patterns, a required name has several spellings (`spelled_names`): each would count.
    can_repeat = (required and not (names.properties or names.patterns)) or any(map(CONTROL.search, required))
    if least <= len(required):
        del part.keywords["minProperties"]
    elif names.optional or not (names.closed or least <= len(required) + (not can_repeat)):
        if not rewriter.checks:
            why = "some properties are optional" if names.optional else "a name may be repeated"
            raise refused(place, "minProperties", f"{why}; list {least:g} required properties")
        rewriter.unenforced[id(source), "minProperties"] = place
        if names.optional:
            del part.keywords["minProperties"]


def _check_maximum(rewriter: Rewriter, part: Rewrite) -> None:
    """Drop `maxProperties` if the schema has no more names. Refuse it beside optional properties, as llguidance does
    without the place, unless another schema decides which properties there are. llguidance enforces a maximum of 1 if
    all names are optional and known."""
    source = part.source
    if "maxProperties" not in source or "object" not in source.get("type", "object"):
        part.keywords.pop("maxProperties", None)
        return
    names, own = _names(rewriter, part), object_of(part.keywords.get("properties"))
    if names.closed and len(names.properties) <= source["maxProperties"]:
        del part.keywords["maxProperties"]
        return
    if source["maxProperties"] == 1 and names.closed and not names.required:
        return
    optional = [name for name, inner in own.items() if name in names.optional and inner is not False]
    if optional and not DECIDING & source.keys():
        shown = json.dumps(optional[0])[:80]
        raise refused(part.place, "maxProperties", f"the property {shown} is optional; list it in required")


def _applying(rewriter: Rewriter, schema: Schema, place: str) -> Iterator[Schema]:
    """Yield a schema and the schemas that always apply with it: parts of `allOf`, and targets of `$ref`."""
    seen, ahead = set[int](), [(schema, place)]
    while ahead:
        rewriter.count(place)
        found, at = ahead.pop()
        if isinstance(found, dict) and id(found) not in seen:
            seen.add(id(found))
            yield found
            ahead += [(inner, f"{at}/allOf/{n}") for n, inner in enumerate(list_of(found.get("allOf")))]
            if "$ref" in found:
                ahead.append((rewriter.document.resolved(found, f"{at}/$ref"), place_of_target(found)))


def _rewrite_dependencies(rewriter: Rewriter, part: Rewrite, key: str) -> None:
    """Rewrite dependencies: each property is absent, or its requirements are met."""
    dependencies = part.source.get(key, {})
    if not isinstance(dependencies, dict):
        raise GrammarError(f"{part.place}/{key}: must be an object")
    for name, wanted in dependencies.items():
        inner = f"{part.place}/{key}/{pointer_part(name)}"
        then = {"required": [name, *wanted]} if are_texts(wanted) else rewriter.schema(wanted, inner)
        # The second part has a type, since the parser follows a value of another type once per part that it fits.
        absent = {"properties": {name: False}}
        part.conditions.append({"anyOf": [absent, both({"type": "object", "required": [name]}, then)]})


def _rewrite_unevaluated(rewriter: Rewriter, part: Rewrite) -> None:
    """Rewrite `unevaluatedProperties` as `additionalProperties`, after listing the names and patterns from all
    subschemas that always apply."""
    place = f"{part.place}/unevaluatedProperties"
    names, patterns = dict[str, None](), dict[str, None]()
    if _evaluated(rewriter, part.source, place, names, patterns, set()):
        return
    part.keywords["properties"] = dict.fromkeys(names, True) | part.keywords.get("properties", {})
    if patterns:
        keys = [name_pattern(rewriter, pattern, place) for pattern in patterns]
        known = part.keywords.get("patternProperties", {})
        part.keywords["patternProperties"] = dict.fromkeys(keys, True) | known
    part.keywords["additionalProperties"] = rewriter.schema(part.source["unevaluatedProperties"], place)


def _evaluated(
    rewriter: Rewriter,
    schema: Schema,
    place: str,
    names: dict[str, None],
    patterns: dict[str, None],
    seen: set[int],
) -> bool:
    """Add the names and patterns of the properties that a schema evaluates. Return True if it evaluates all of them.
    `seen`: identities of the schemas on the path to this one."""
    rewriter.count(place)
    if not isinstance(schema, dict) or id(schema) in seen:
        return False
    seen.add(id(schema))
    if "additionalProperties" in schema or (len(seen) > 1 and "unevaluatedProperties" in schema):
        return True
    names |= dict.fromkeys(object_of(schema.get("properties")))
    patterns |= dict.fromkeys(object_of(schema.get("patternProperties")))
    always = list(list_of(schema.get("allOf")))
    if "$ref" in schema:
        always.append(rewriter.document.resolved(schema, place))
    every = [_evaluated(rewriter, inner, place, names, patterns, seen) for inner in always]
    perhaps = [*list_of(schema.get("anyOf")), *list_of(schema.get("oneOf"))]
    perhaps += [schema[key] for key in ("if", "then", "else") if key in schema]
    perhaps += object_of(schema.get("dependentSchemas")).values()
    for inner in perhaps:
        more, further = dict[str, None](), dict[str, None]()
        whole = _evaluated(rewriter, inner, place, more, further, set(seen))
        if whole or set(more) - set(names) or set(further) - set(patterns):
            raise GrammarError(f"{place}: cannot be enforced beside alternatives: use additionalProperties in each")
    return any(every)
