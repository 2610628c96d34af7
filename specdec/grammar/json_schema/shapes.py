"""The shapes of keywords' values. llguidance refuses wrong ones as well, but does not say where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.values import are_texts, is_number

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")
NUMBERS = ("integer", "number")
MAX_SIZE = 2**64 - 1
"""Maximum size, of an unsigned integer in llguidance."""
SIZE = f"a whole number from 0 to {MAX_SIZE}"
MAX_SHOWN_CHARACTERS = 40


class Shape(NamedTuple):
    """The condition on a keyword's value. `types`: the types of JSON values that the keyword applies to."""

    fits: Callable[[Any], bool]
    wanted: str
    types: Sequence[str] = TYPES


def check_shapes(schema: Mapping[str, Any], place: str) -> None:
    """Refuse a schema if a keyword's value has the wrong shape. Subschemas are not checked.

    Keywords that do not apply to the schema's own type are not checked either: many published schemas have draft 3's
    `"required": true` beside the type of a field."""
    allowed: Sequence[str] = TYPES
    for key, shape in SHAPES.items():
        if key not in schema or not set(shape.types).intersection(allowed):
            continue
        value = schema[key]
        if not shape.fits(value):
            given = f"is {json.dumps(value[:MAX_SHOWN_CHARACTERS])}, " if isinstance(value, str) else ""
            raise GrammarError(f"{place}/{key}: {given}must be {shape.wanted}")
        if key == "type":
            allowed = (value,) if isinstance(value, str) else tuple(value)


def _are_types(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else are_texts(value) and {*value} <= {*TYPES} and bool(value)


def _is_size(value: Any) -> bool:
    return is_number(value) and 0 <= value <= MAX_SIZE and (isinstance(value, int) or value.is_integer())


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float)  # draft 4's exclusive bounds are true or false


def _each(shape: Shape, *keys: str) -> dict[str, Shape]:
    return dict.fromkeys(keys, shape)


SHAPES: Mapping[str, Shape] = {
    "type": Shape(_are_types, f"one of {', '.join(TYPES)}, or a list of these"),
    "pattern": Shape(lambda value: value is None or isinstance(value, str), "text", ("string",)),
    "required": Shape(are_texts, "a list of names", ("object",)),
    "prefixItems": Shape(lambda value: value is None or isinstance(value, list), "a list", ("array",)),
    **_each(Shape(lambda value: isinstance(value, dict), "an object", ("object",)), "properties", "patternProperties"),
    **_each(Shape(lambda value: isinstance(value, list), "a list"), "allOf", "anyOf", "enum", "oneOf"),
    **_each(Shape(_is_bound, "a number", NUMBERS), "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"),
    "multipleOf": Shape(lambda value: is_number(value) and value > 0, "a number above 0", NUMBERS),
    **_each(Shape(_is_size, SIZE), "maxItems", "minItems"),  # for every type, since `contains` reads them
    **_each(Shape(_is_size, SIZE, ("array",)), "maxContains", "minContains"),
    **_each(Shape(_is_size, SIZE, ("object",)), "maxProperties", "minProperties"),
    **_each(Shape(_is_size, SIZE, ("string",)), "maxLength", "minLength"),
}
"""`type` comes first, since it decides which of the others apply. Keywords not listed here are checked where they are
rewritten."""
