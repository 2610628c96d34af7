"""JSON values in schemas: their shapes, which may be wrong, and numbers as llguidance holds them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, TypeGuard

BOUNDS = {
    "minimum": ("exclusiveMaximum", 1),
    "exclusiveMinimum": ("maximum", 1),
    "maximum": ("exclusiveMinimum", -1),
    "exclusiveMaximum": ("minimum", -1),
}
"""Bounds of numbers: the opposite one, and the direction away from the bound."""

LARGEST = 2**63 - 1024
"""The largest bound llguidance can hold a number to: below 2^63, as a 64-bit float."""


def are_objects(schema: Mapping[str, Any], *keys: str) -> bool:
    """Return True unless a keyword's value is of the wrong type, which compilation refuses."""
    return all(isinstance(schema.get(key, {}), dict) for key in keys)


def are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def is_at_most(value: Any, limit: int) -> bool:
    return is_number(value) and value <= limit


def is_exact(value: Any) -> bool:
    """Return True for a number that a 64-bit float holds."""
    return is_number(value) and abs(value) <= 2**53


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def is_one_of(value: Any, known: Iterable[str]) -> TypeGuard[str]:
    """Return True if a value is one of these names."""
    return isinstance(value, str) and value in known


def object_of(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def pointer_part(key: str) -> str:
    """Return a key as part of a JSON pointer, cut to what an error can show."""
    return key.replace("~", "~0").replace("/", "~1")[:40]


def bound(value: float, away: int) -> float:
    """Return the nearest bound that llguidance holds a number to exactly, among those that allow no further number:
    above `value` if `away` is 1, else below."""
    if value * away < -LARGEST:
        return -LARGEST * away
    if isinstance(value, float):
        return value
    rounded = float(value)
    return int(rounded if (int(rounded) - value) * away >= 0 else math.nextafter(rounded, math.inf * away))


def inexact(value: Any) -> tuple[list[str], int]:
    """Return the numbers in a value that llguidance would write as another number, since it holds them as 64-bit
    floats, and how many values there are in all."""
    ahead, found, size = [value], list[str](), 0
    while ahead:
        size += 1
        match ahead.pop():
            case dict() as inner:
                ahead += inner.values()
            case list() as inner:
                ahead += inner
            case int() as number if abs(number) > 2**53 and (abs(number) >= 2**63 or int(float(number)) != number):
                found.append(str(number)[:40] if number.bit_length() < 1000 else "a number")
    return found, size
