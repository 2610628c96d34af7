"""Rewritten schemas as sets of values: their unions and intersections."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Schema = Any
"""A schema: an object, or true or false."""


def alternatives(schema: Schema) -> list[Schema]:
    """Return the alternatives of a schema that consists only of `anyOf`; for any other, the schema itself."""
    return schema["anyOf"] if isinstance(schema, dict) and set(schema) == {"anyOf"} else [schema]


def any_of(schemas: Iterable[Schema]) -> Schema:
    """Return a schema for the values that at least one of these schemas allows."""
    found = [part for schema in schemas for part in alternatives(schema) if part is not False]
    if True in found:
        return True
    return {"anyOf": found} if len(found) > 1 else found[0] if found else False


def both(first: Schema, second: Schema) -> Schema:
    """Return a schema for the values that both schemas allow."""
    if False in (first, second):
        return False
    return first if second is True else second if first is True else {"allOf": [first, second]}
