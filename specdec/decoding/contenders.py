"""Who can win a Gumbel race: of every row's ids the few that are worth their noise in float64.

Over whole vocabularies this is where sampling takes its time, so it is compiled: importing this module wants Numba,
which only a verifier has.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import GAMMA, MULTIPLY_1, MULTIPLY_2, token_words, word_gumbel

BOUND_ERROR = 1e-4
"""How far a bound of the noise may fall short: float32 arithmetic on numbers of up to 179, and to spare."""

ROUNDING = 1e-6
"""More than the relative error of a few float32 operations (6e-8 each)."""


def contenders(z: NDArray[np.float32], streams: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices into the flattened z [n, V], ascending, among them every row's winner: those of the ids whose
    upper bound is not below a score that was reached. Mostly one or two a row.

    The largest of each row must be finite; -inf elsewhere rules an id out.
    """
    bound = np.empty_like(z)
    bounds(z, streams, bound)
    promising = bound.argmax(axis=1)
    rows = np.arange(len(z))
    highest = bound[rows, promising]
    reached = z[rows, promising] + word_gumbel(token_words(streams, promising))
    # A winner's bound lies between these two, give or take its own rounding: their size is what limits that.
    slack = BOUND_ERROR + ROUNDING * np.maximum(np.abs(highest), np.abs(reached))
    return np.flatnonzero(bound >= (reached - slack).astype(np.float32)[:, None])


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def bounds(z: Any, streams: Any, out: Any) -> None:
    """Write to `out` [n, V] what is not below z + noise, but for BOUND_ERROR and rounding.

    `noise.token_words`, and a bound of what they stand for, without a number leaving its register. Since
    -log(u) >= 1 - u, the noise is at most -log(1 - u), and 1 - u comes exactly from the word's complement. Of the
    binary logarithm of 2**e * (1 + m), e + m is a lower bound, by 0.09 at most (Mitchell 1962), and it is what the
    bits of a float say when they are read as an integer.
    """
    for row in range(len(z)):
        state = streams[row] + np.uint64(GAMMA)
        for token in range(z.shape[1]):
            word = state + np.uint64(token)
            word = (word ^ (word >> np.uint64(30))) * np.uint64(MULTIPLY_1)
            word = (word ^ (word >> np.uint64(27))) * np.uint64(MULTIPLY_2)
            word ^= word >> np.uint64(31)
            complement = np.float32(np.float32(np.int64(~word >> np.uint64(12))) + np.float32(0.5))  # (1 - u) * 2**52
            logarithm = np.float32(complement.view(np.int32)) * np.float32(2.0**-23)  # binary, and 127
            out[row, token] = z[row, token] + (np.float32(127 + 52) - logarithm) * np.float32(math.log(2))
