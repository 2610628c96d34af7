"""Numbers, which llguidance stores as 64-bit floats: bounds, `const` and `enum`."""

from __future__ import annotations

import math
from typing import Any

from specdec.grammar.json_schema.rewriter import Rewrite, Rewriter, refused
from specdec.grammar.json_schema.values import is_number

BOUNDS = {
    "minimum": ("exclusiveMaximum", 1),
    "exclusiveMinimum": ("maximum", 1),
    "maximum": ("exclusiveMinimum", -1),
    "exclusiveMaximum": ("minimum", -1),
}
"""For each bound: its negation, and the direction in which numbers are allowed."""

LARGEST = 2**63 - 1024
"""The largest bound that llguidance can enforce: the largest 64-bit float below 2^63."""


LEAST = 1e-30
"""The bound in place of an excluded 0. It is not the smallest float, since llguidance spells out all digits."""


def rewrite_listed_values(rewriter: Rewriter, part: Rewrite) -> None:
    """Copy `const` and `enum`, unless llguidance would change one of their numbers."""
    for key in ("const", "enum"):
        if key in part.source:
            rounded, size = inexact(part.source[key])
            rewriter.count(part.place, size)
            if rounded:
                problem = f"{rounded[0]} has more digits than a 64-bit float; write it as a string"
                raise refused(part.place, key, problem)
            part.keywords[key] = part.source[key]


def rewrite_bounds(rewriter: Rewriter, part: Rewrite) -> None:
    for key in BOUNDS:
        if key in part.source:
            part.keywords[key] = rewritten_bound(rewriter, key, part.source[key], part.place)
    if part.source.get("maximum") == 2**63 - 1 and part.source.get("type") == "integer":
        part.keywords["maximum"] = 2**63 - 1  # the only exact bound above LARGEST


def rewritten_bound(rewriter: Rewriter, key: str, value: Any, place: str) -> Any:
    """Return the bound, moved inward if necessary, so that llguidance enforces it exactly."""
    _, away = BOUNDS[key]
    if not is_number(value):
        return value  # draft 4's flag, or an invalid value
    if value * away > LARGEST:
        raise refused(place, key, f"must be between -{LARGEST} and {LARGEST}")
    bound = _nearest(value, away)
    if not key.startswith("exclusive") or bound * away < 0 or not float(bound).is_integer():
        return bound
    # llguidance allows an excluded integer if the other bound is less than 1 away. The other bound may be in another
    # schema, so every fractional number of the document counts.
    if int(bound) - (away < 0) not in rewriter.floors:
        return bound
    return math.nextafter(bound, math.inf * away) if bound else away * LEAST


def _nearest(value: float, away: int) -> float:
    """Return the nearest exact bound: above `value` if `away` is 1, else below it."""
    if value * away < -LARGEST:
        return -LARGEST * away
    if isinstance(value, float):
        return value
    rounded = float(value)
    return int(rounded if (int(rounded) - value) * away >= 0 else math.nextafter(rounded, math.inf * away))


def is_exact(value: Any) -> bool:
    """Return True for a number small enough to be exact as a 64-bit float."""
    return is_number(value) and abs(value) <= 2**53


def inexact(value: Any) -> tuple[list[str], int]:
    """Return the numbers in a value that llguidance would change by storing them as 64-bit floats; and the total count
    of values."""
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
