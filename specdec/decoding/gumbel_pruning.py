"""Pruning for Gumbel-max: finds the few ids of every row that can win. Only these need float64 noise.

Over whole vocabularies, pruning dominates the sampling time, so it is compiled: importing this module needs Numba,
which only a verifier has.
"""

from __future__ import annotations

import math
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import GAMMA, MULTIPLY_1, MULTIPLY_2

BOUND_ERROR = 1e-4
"""Maximum amount by which a computed upper bound can fall below the noise: float32 rounding of numbers up to 179
(127 + 52), and a margin."""

ROUNDING = 1e-6
"""Relative slack: more than the error of a few float32 operations (6e-8 each)."""

STRIDE = 256
"""Number of bounds compared together: most stretches of this length hold no id that can win."""

ROOM = 8
"""Ids per row that fit into the first attempt's buffer."""


def possible_winners(
    z: NDArray[np.float32], temperatures: NDArray[np.float32], streams: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return the ids that can win: ascending indices into the flattened z [n, V], including the winner of every row of
    z / temperature.

    An id is kept if its upper bound on logit plus noise is at least the actual logit plus noise of the row's id with
    the highest bound. One or two ids are kept in most rows. The largest logit of each row must be finite; other logits
    may be -inf, which rules their ids out.
    """
    z = np.ascontiguousarray(z)
    room = ROOM * len(z)
    while True:
        found = np.empty(room, dtype=np.int64)
        count = collect(z, temperatures, streams, found)
        if count <= room:
            return found[:count]
        room = count


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def bounds(z: Any, temperature: Any, stream: Any, out: Any) -> None:
    """Write an upper bound on z / temperature + noise to `out` [V]. It may be too low by BOUND_ERROR and rounding.

    Fusing `noise.token_words` with a bound on the noise keeps all numbers in registers. Since -log(u) >= 1 - u, the
    noise is at most -log(1 - u), and 1 - u comes exactly from the word's complement. The binary logarithm of
    2**e * (1 + m) is at least e + m and at most 0.09 more (Mitchell 1962). Scaled and biased, e + m is the integer
    value of a float's bits.
    """
    for token in range(len(z)):
        complement = np.float32(np.float32(np.int64(~_word(stream, token) >> np.uint64(12))) + np.float32(0.5))
        logarithm = np.float32(complement.view(np.int32)) * np.float32(2.0**-23)  # about log2((1 - u) * 2**52) + 127
        out[token] = z[token] / temperature + (np.float32(127 + 52) - logarithm) * np.float32(math.log(2))


@numba.njit(nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def collect(z: Any, temperatures: Any, streams: Any, found: Any) -> int:
    """Write the ids that can win to `found`, as many as fit, and return how many can win in total. A row's bounds stay
    in the core's cache."""
    count, vocabulary = 0, z.shape[1]
    bound = np.empty(vocabulary, dtype=np.float32)
    for row in range(len(z)):
        bounds(z[row], temperatures[row], streams[row], bound)
        highest, promising = _highest(bound), 0  # the id with the highest bound; others must reach its actual sum
        while promising < vocabulary - 1 and bound[promising] != highest:
            promising += 1
        uniform = (np.float64(_word(streams[row], promising) >> np.uint64(12)) + 0.5) * 2.0**-52
        reached = z[row, promising] / temperatures[row] - math.log(-math.log(uniform))
        # A winner's bound lies between `reached` and `highest`, except for rounding relative to their magnitude.
        slack = BOUND_ERROR + ROUNDING * max(abs(highest), abs(reached))
        least = np.float32(reached - slack)
        for start in range(0, vocabulary, STRIDE):
            stretch = bound[start : start + STRIDE]
            if _highest(stretch) < least:
                continue
            for token in range(len(stretch)):
                if stretch[token] >= least:
                    if count < len(found):
                        found[count] = row * vocabulary + start + token
                    count += 1
    return count


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _highest(bound: Any) -> Any:
    """Return the largest bound. Comparing the bits as order-preserving integers vectorises to eight at a time."""
    bits, highest = bound.view(np.int32), np.int32(-(2**31))
    for token in range(len(bits)):
        highest = max(highest, np.int32(bits[token] ^ ((bits[token] >> 31) & 0x7FFFFFFF)))
    return np.int32(highest ^ ((highest >> 31) & 0x7FFFFFFF)).view(np.float32)


@numba.njit(nogil=True, inline="always")  # type: ignore[untyped-decorator]
def _word(stream: Any, token: Any) -> Any:
    """Return the word of one token, as `noise.token_words` does."""
    word = stream + np.uint64(GAMMA) + np.uint64(token)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(MULTIPLY_1)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(MULTIPLY_2)
    return word ^ (word >> np.uint64(31))
