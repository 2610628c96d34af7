"""JSON values in schemas, which may have the wrong shape: tests of their shape, and parts of JSON pointers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard


def are_objects(schema: Mapping[str, Any], *keys: str) -> bool:
    """Return True if each of these keywords is missing or has an object as its value; compilation refuses other
    values."""
    return all(isinstance(schema.get(key, {}), dict) for key in keys)


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def floors(value: Any) -> tuple[frozenset[int], int]:
    """Return the integers directly below the fractional numbers in a value, and how many values it consists of."""
    found, ahead, size = set[int](), [value], 0
    while ahead:
        size += 1
        match ahead.pop():
            case dict() as inner:
                ahead += inner.values()
            case list() as inner:
                ahead += inner
            case float() as number if math.isfinite(number) and not number.is_integer():
                found.add(math.floor(number))
    return frozenset(found), size


def is_at_most(value: Any, limit: int) -> bool:
    return is_number(value) and value <= limit


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_one_of(value: Any, known: Iterable[str]) -> TypeGuard[str]:
    """Return True if a value is one of these names."""
    return isinstance(value, str) and value in known


def object_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def whole(value: Any) -> Any:
    """Return a whole number as an integer, which llguidance requires of sizes: JSON Schema also allows 2.0. Return any
    other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def pointer_part(key: str) -> str:
    """Return a key as part of a JSON pointer, cut to the length that an error can show."""
    return key.replace("~", "~0").replace("/", "~1")[:40]
