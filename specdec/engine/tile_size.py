"""How many rows had best be computed at once: those at which a row takes the least time.

A weight that is read serves all rows of a tile; but results that fit no cache are fetched again by whoever reads them,
and not every product over many rows is shared among threads as it might be.
"""

from __future__ import annotations

import math
from collections.abc import Callable

SIZES = (128, 256, 512)
REPEATS = 3
CHEAPER = 0.93
"""Part of the time for a row of larger tiles that it must come down to: what is less may be chance."""


def cheapest(seconds: Callable[[int], float], most: int, long: float = math.inf) -> int:
    """The number of rows, up to `most`, at which a row is cheapest, if so many take seconds(rows). Beyond one that
    takes a `long` time, in seconds, no other is tried."""
    sizes = [*(n for n in SIZES if n < most), most]
    if len(sizes) == 1:
        return most
    least = dict.fromkeys(sizes, math.inf)
    for _ in range(REPEATS):  # in turns: a slow spell of the machine falls on all alike
        for rows in sizes:
            least[rows] = min(least[rows], seconds(rows))
            if least[rows] > long:
                sizes = [n for n in sizes if n <= rows]
                break
    best = sizes.pop()
    for rows in reversed(sizes):
        if least[rows] / rows < CHEAPER * least[best] / best:
            best = rows
    return best
