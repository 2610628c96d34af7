"""Partials: results of attention over parts of a text on a GPU, before they are summed (`gpu/layout.py`)."""

from __future__ import annotations

SPLIT = 256
"""Positions in a split: a row has a partial for each split of its text."""

MAX_PARTIALS = 1 << 14
"""Partials in memory at a time: 270 MB with 32 query heads of width 128. Only batches whose attention takes several
milliseconds have more, such as 256 rows at position 16,384."""

WAVE_ROWS = 4
"""The rows of every wave but the last are a multiple of this number, so that all waves' arrays are aligned to 16 bytes,
as the kernels expect."""


def partials_for(longest: int) -> int:
    """Return how many partials a pass has memory for, with texts of up to `longest` tokens."""
    return max(MAX_PARTIALS, WAVE_ROWS * -(-longest // SPLIT))


def numbers_of_a_partial(heads: int, value_width: int) -> int:
    """Return how many numbers a partial has: for each query head the largest score, the sum of weights, and the
    weighted sum of values."""
    return heads * (2 + value_width)
