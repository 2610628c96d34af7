"""The tile size, in rows, that takes the least time per row.

In a large tile, each read of a weight serves more rows. But results larger than a cache are read back from memory, and
not every product over many rows distributes well over threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SIZES = (128, 256, 512)
REPEATS = 3
ENOUGH = 0.3
"""Seconds of measurement after which the last repeat is skipped."""

CHEAPER = 0.93
"""Fraction of another size's time per row below which a size is cheaper: a smaller gain may be chance."""


def cheapest(seconds: Callable[[int], float], most: int, long: float = math.inf, *, few: bool = False) -> int:
    """Return the number of rows, up to `most`, with the least time per row; seconds(rows) measures a tile. Among
    equally good sizes the largest wins, or with `few` the smallest. After a tile takes more than `long` seconds, larger
    tiles are skipped."""
    sizes = [*(n for n in SIZES if n < most), most]
    least = dict.fromkeys(sizes, math.inf)
    total = 0.0
    for repeat in range(REPEATS):  # in turns, so that a slow spell of the machine affects all sizes equally
        if len(sizes) == 1:
            return sizes[0]
        if repeat == REPEATS - 1 and total > ENOUGH:
            break
        for rows in sizes:
            took = seconds(rows)
            total, least[rows] = total + took, min(least[rows], took)
            if least[rows] > long:
                sizes = [n for n in sizes if n <= rows]
                break
    row_seconds = {rows: least[rows] / rows for rows in sizes}
    if few:  # the smallest size that no other beats by more than chance
        return next(rows for rows in sizes if CHEAPER * row_seconds[rows] <= min(row_seconds.values()))
    best = sizes.pop()
    for rows in reversed(sizes):
        if row_seconds[rows] < CHEAPER * row_seconds[best]:
            best = rows
    return best
