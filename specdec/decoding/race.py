"""The Gumbel race: for many rows at once, the token with the largest z[v] + g(v).

The noise is only worked out in float64 for ids that can win. Nothing is approximate: what is left out
provably loses. No row's winner depends on the other rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import GAMMA, MULTIPLY_1, MULTIPLY_2, token_words, word_gumbel

ROUNDING = 1e-6
"""More than the relative error of a few float32 operations (6e-8 each)."""

BOUND_ERROR = 1e-4
"""How far a bound of the noise may fall short: float32 arithmetic on numbers of up to 179, and to spare."""


def contenders(z: NDArray[np.float32], streams: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices into the flattened z [n, V], ascending, among them every row's winner: those of the ids whose
    upper bound is not below a score that was reached. Mostly one or two a row.

    The largest of each row must be finite; -inf elsewhere rules an id out.
    """
    bound = bounds(z, streams)
    promising = bound.argmax(axis=1)
    rows = np.arange(len(z))
    highest = bound[rows, promising]
    reached = z[rows, promising] + word_gumbel(token_words(streams, promising))
    # A winner's bound lies between these two, give or take its own rounding: their size is what limits that.
    slack = BOUND_ERROR + ROUNDING * np.maximum(np.abs(highest), np.abs(reached))
    return np.flatnonzero(bound >= (reached - slack).astype(np.float32)[:, None])


def bounds(z: NDArray[np.float32], streams: NDArray[np.uint64]) -> NDArray[np.float32]:
    """[n, V], not below z + noise but for BOUND_ERROR and rounding."""
    out = np.empty_like(z)
    _loop()(z, streams, out)
    return out


@functools.cache
def _loop() -> Callable[..., None]:
    """Compiled when it is first asked for: only who draws over whole vocabularies needs Numba."""
    import numba

    @numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
    def loop(z: Any, streams: Any, out: Any) -> None:
        """`noise.token_words`, and a bound of what they stand for, without a number leaving its register.

        Since -log(u) >= 1 - u, the noise is at most -log(1 - u), and 1 - u comes exactly from the word's complement.
        Of the binary logarithm of a number 2**e * (1 + m), e + m is a lower bound, by 0.09 at most (Mitchell
        1962), and it is what the bits of a float say when they are read as an integer.
        """
        for row in range(len(z)):
            state = streams[row] + np.uint64(GAMMA)
            for token in range(z.shape[1]):
                word = state + np.uint64(token)
                word = (word ^ (word >> np.uint64(30))) * np.uint64(MULTIPLY_1)
                word = (word ^ (word >> np.uint64(27))) * np.uint64(MULTIPLY_2)
                word ^= word >> np.uint64(31)
                complement = np.float32(np.int64(~word >> np.uint64(12))) + np.float32(0.5)  # (1 - u) * 2**52
                logarithm = np.float32(np.float32(complement).view(np.int32)) * np.float32(2.0**-23)  # binary, and 127
                out[row, token] = z[row, token] + (np.float32(127 + 52) - logarithm) * np.float32(math.log(2))

    compiled: Callable[..., None] = loop
    return compiled


def winners(z: NDArray[np.float32], streams: NDArray[np.uint64], runners: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [n]: of each row of z [n, V] the token with the largest score, the lowest on ties.

    `runners` are indices into the flattened z, ascending, at least one of each row.
    """
    if len(runners) == len(z):
        return np.asarray(runners % z.shape[1])  # each is the only one of its row
    rows, ids = np.divmod(runners, z.shape[1])
    scores = z.ravel()[runners] + word_gumbel(token_words(streams[rows], ids))
    every = np.arange(len(z))
    best = np.maximum.reduceat(scores, np.searchsorted(rows, every))
    won = np.flatnonzero(scores == best[rows])
    first = won[np.searchsorted(rows[won], every)]
    return np.asarray(ids[first])
