"""The number of examples of property tests."""

from __future__ import annotations

from hypothesis import settings


def examples(count: int) -> int:
    """Return `count`, or three times as many while hypothesis tries other examples than the usual ones (`make verify`),
    which depend on chance."""
    return count if settings().derandomize else 3 * count
