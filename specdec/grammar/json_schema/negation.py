"""Negations: a schema for the values that another schema does not allow. llguidance has no keyword for this.

A value breaks a schema by breaking one of its keywords, so a negation is the union of the keywords' opposites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.numbers import BOUNDS, inexact, rewritten_bound
from specdec.grammar.json_schema.rewriter import Rewriter
from specdec.grammar.json_schema.schemas import Schema, any_of, both
from specdec.grammar.json_schema.shapes import check_shapes
from specdec.grammar.json_schema.strings import FORMAT_PATTERNS, LIBRARY_FORMATS
from specdec.grammar.json_schema.values import are_texts, is_number, is_one_of, pointer_part, whole
from specdec.grammar.patterns import PatternError, UnreadableError

OTHER_TYPES = ("null", "boolean", "string", "array", "object")
"""All types except numbers."""

TYPE_OF = {"Length": "string", "Items": "array", "Properties": "object"}
"""Types of values, by the suffix of the keywords that limit their size."""

UNDENIED = frozenset(
    [
        *("$dynamicRef", "$recursiveRef", "additionalItems", "additionalProperties", "contains", "dependencies"),
        *("dependentRequired", "dependentSchemas", "format", "items", "multipleOf", "oneOf", "patternProperties"),
        *("prefixItems", "propertyNames", "unevaluatedItems", "unevaluatedProperties", "uniqueItems"),
    ]
)
"""Keywords without an opposite, at least for some values."""

CONSTRAINTS = UNDENIED.union(
    [
        *("allOf", "anyOf", "enum", "exclusiveMaximum", "exclusiveMinimum", "maxItems", "maxLength", "maxProperties"),
        *("maximum", "minItems", "minLength", "minProperties", "minimum", "pattern", "properties", "required"),
    ]
)
"""The keywords above, and keywords that have an opposite only if their value has the right type."""


def negation(rewriter: Rewriter, schema: Schema, place: str) -> Schema:
    """Return a schema for all values that a schema does not allow; GrammarError if there is none."""
    rewriter.count(place)
    if isinstance(schema, bool):
        return not schema
    if not isinstance(schema, dict):
        raise GrammarError(f"{place}: must be an object, true or false")
    check_shapes(schema, place)
    with rewriter.level(place):
        ways: list[Schema] = []
        for key, value in schema.items():
            ways += _ways_out(rewriter, key, value, schema, f"{place}/{pointer_part(key)}")
    return any_of(ways)


def _ways_out(rewriter: Rewriter, key: str, value: Any, schema: Mapping[str, Any], place: str) -> Sequence[Schema]:
    """Return schemas that together allow the values that break a keyword."""

    def opposite(inner: Schema, at: str = place) -> Schema:
        return negation(rewriter, inner, at)

    match key:
        case "type":
            return _other_types(value, place)
        case "const":
            return _other_values(rewriter, [value], place)
        case "enum" if isinstance(value, list):
            return _other_values(rewriter, value, place)
        case "pattern" if isinstance(value, str):
            languages = rewriter.languages
            try:
                rewriter.count(place, len(value))
                texts = languages.patterns(languages.complement(languages.of_pattern(value)))
                rewriter.count(place, sum(map(len, texts)))
            except (PatternError, UnreadableError) as error:
                raise _without_opposite(place, f": it {error}") from None
            return [{"type": "string", "allOf": [{"pattern": text} for text in texts]}]
        case "minLength" | "minItems" | "minProperties" if is_number(value):
            return [{"type": TYPE_OF[key[3:]], f"max{key[3:]}": whole(value) - 1}] if value > 0 else []
        case "maxProperties" if is_number(value) and value > 0:
            raise _without_opposite(place, ": a name may be repeated")
        case "maxLength" | "maxItems" | "maxProperties" if is_number(value):
            return [{"type": TYPE_OF[key[3:]], f"min{key[3:]}": whole(value) + 1}]
        case "minimum" | "exclusiveMinimum" | "maximum" | "exclusiveMaximum" if is_number(value):
            bound, _ = BOUNDS[key]
            return [{"type": "number", bound: rewritten_bound(rewriter, bound, value, place)}]
        case "required" if are_texts(value):
            return [{"type": "object", "properties": {name: False}} for name in value]
        case "properties" if isinstance(value, dict):
            broken = {name: opposite(inner, f"{place}/{pointer_part(name)}") for name, inner in value.items()}
            return [
                {"type": "object", "properties": {name: inner}, "required": [name]}
                for name, inner in broken.items()
                if inner is not False
            ]
        case "prefixItems" if isinstance(value, list):
            rewriter.count(place, len(value) ** 2)
            return [
                {"type": "array", "prefixItems": [True] * at + [opposite(item, f"{place}/{at}")], "minItems": at + 1}
                for at, item in enumerate(value)
            ]
        case "dependentRequired" | "dependentSchemas" | "dependencies" if isinstance(value, dict):
            return [_unmet(rewriter, name, needed, place) for name, needed in value.items()]
        case "if":
            around = place.removesuffix("/if")
            then = opposite(schema.get("then", True), f"{around}/then")
            other = opposite(schema.get("else", True), f"{around}/else")
            return [both(rewriter.schema(value, place), then), both(opposite(value), other)]
        case "contains" if not {"minContains", "maxContains"} & set(schema):
            return [{"type": "array", "items": opposite(value)}]
        case "allOf" if isinstance(value, list):
            return [opposite(item, f"{place}/{n}") for n, item in enumerate(value)]
        case "anyOf" if isinstance(value, list):
            return [{"allOf": [opposite(item, f"{place}/{n}") for n, item in enumerate(value)]}]
        case "not":
            return [rewriter.schema(value, place)]
        case "$ref":
            return [rewriter.entered(opposite, schema, place)]
        case (
            "items"
            | "additionalItems"
            | "unevaluatedItems"
            | "additionalProperties"
            | "unevaluatedProperties"
            | "propertyNames"
        ) if value in (True, {}):
            return []
        case "uniqueItems" if value is False:
            return []
        case "format" if not is_one_of(value, LIBRARY_FORMATS) and not is_one_of(value, FORMAT_PATTERNS):
            return []
    if key in CONSTRAINTS:
        raise _without_opposite(place)
    return []


def _without_opposite(place: str, why: str = "") -> GrammarError:
    return GrammarError(f"{place}: cannot be enforced within not or if{why}")


def _unmet(rewriter: Rewriter, name: str, needed: Any, place: str) -> Schema:
    """Return a schema for objects that have a property but not what it requires."""
    if are_texts(needed):
        ways: Schema = any_of([{"properties": {other: False}} for other in needed])
    else:
        ways = negation(rewriter, needed, f"{place}/{pointer_part(name)}")
    return both({"type": "object", "required": [name]}, ways)


def _other_types(value: Any, place: str) -> Sequence[Schema]:
    names = set(map(str, value if isinstance(value, list) else [value]))
    if wrong := names - {*OTHER_TYPES, "number", "integer"}:
        raise GrammarError(f"{place}: {min(wrong)[:40]} is not a type")
    if "integer" in names and "number" not in names:
        raise _without_opposite(place, ": integer has no opposite; use number")
    others = [name for name in (*OTHER_TYPES, "number") if name not in names]
    return [{"type": others}] if others else []


def _other_values(rewriter: Rewriter, values: Sequence[Any], place: str) -> Sequence[Schema]:
    """Return schemas for all values except these."""
    if any(isinstance(value, list | dict) for value in values):
        raise _without_opposite(place, ": has a list or an object")
    rounded, size = inexact(list(values))
    rewriter.count(place, size)
    for wrong in rounded:
        raise GrammarError(f"{place}: cannot be enforced: {wrong} has more digits than a 64-bit float")
    strings = [value for value in values if isinstance(value, str)]
    numbers = sorted({value for value in values if is_number(value)})
    left = [value for value in (True, False) if not any(value is other for other in values)]
    free = {"array", "object"} | ({"null"} if None not in values else set())
    free |= ({"string"} if not strings else set()) | ({"number"} if not numbers else set())
    free |= {"boolean"} if len(left) == 2 else set()
    found: list[Schema] = [{"type": [name for name in (*OTHER_TYPES, "number") if name in free]}]
    if len(left) == 1:
        found.append({"const": left[0]})
    if strings:
        languages = rewriter.languages
        try:
            other = languages.complement(languages.union(map(languages.literal, strings)))
            found.append({"type": "string", "pattern": languages.pattern(other)})
            rewriter.count(place, len(found[-1]["pattern"]))
        except PatternError as error:
            raise _without_opposite(place, f": it {error}") from None
    if numbers:
        for low, high in pairwise([None, *numbers, None]):
            bounds = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            found.append(
                {"type": "number"}
                | {
                    key: rewritten_bound(rewriter, key, bound, place)
                    for key, bound in bounds.items()
                    if bound is not None
                }
            )
    return found
