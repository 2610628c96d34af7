"""The shapes of keywords' values. llguidance refuses wrong ones as well, but does not say where they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from specdec.grammar.grammar import GrammarError
from specdec.grammar.json_schema.values import are_texts, is_number

TYPES = ("array", "boolean", "integer", "null", "number", "object", "string")


def check_shapes(schema: Mapping[str, Any], place: str) -> None:
    """Refuse a schema that has a keyword with a value of the wrong shape, not looking into the schemas inside."""
    for key, (fits, wanted) in SHAPES.items():
        value = schema.get(key)
        if value is not None and not fits(value):
            told = f"is {json.dumps(value[:40])}, " if isinstance(value, str) else ""
            raise GrammarError(f"{place}/{key}: {told}must be {wanted}")


def _are_types(value: Any) -> bool:
    return value in TYPES if isinstance(value, str) else are_texts(value) and set(value) <= set(TYPES)


def _is_size(value: Any) -> bool:
    return is_number(value) and value >= 0


def _is_bound(value: Any) -> bool:
    return isinstance(value, int | float)  # draft 4's exclusive bounds are true or false


_OBJECT = (lambda value: isinstance(value, dict)), "an object"
_LIST = (lambda value: isinstance(value, list)), "a list"

SHAPES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "type": (_are_types, f"one of {', '.join(TYPES)}, or a list of these"),
    "pattern": ((lambda value: isinstance(value, str)), "text"),
    "required": (are_texts, "a list of names"),
    **dict.fromkeys(("properties", "patternProperties"), _OBJECT),
    **dict.fromkeys(("allOf", "anyOf", "enum", "oneOf", "prefixItems"), _LIST),
    **dict.fromkeys(("exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"), (_is_bound, "a number")),
    **dict.fromkeys(
        ("maxItems", "maxLength", "maxProperties", "minItems", "minLength", "minProperties", "multipleOf"),
        (_is_size, "a number, at least 0"),
    ),
}
"""Keywords whose values are copied for llguidance, with the test of a value's shape and its description. The rewriting
itself refuses values of other keywords."""
