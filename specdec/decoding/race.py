"""The Gumbel race: for many rows at once, the token with the largest z[v] + g(v).

The noise is only worked out in float64 for ids that can win. Nothing is approximate: what is left out
provably loses. No row's winner depends on the other rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import BOUND_ERROR, token_words, word_gumbel, word_gumbel_bound

TILE = 1 << 16
"""So many ids of a row are hashed at a time: the words, twice as wide as logits, stay in the cache."""

ROUNDING = 1e-6
"""More than the relative error of a few float32 operations (6e-8 each)."""


def contenders(z: NDArray[np.float32], streams: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Indices into the flattened z [n, V], ascending, among them every row's winner: those of the ids whose
    upper bound is not below a score that was reached. Mostly one or two a row.

    The largest of each row must be finite; -inf elsewhere rules an id out.
    """
    bound = z.copy()
    for left in range(0, z.shape[1], TILE):
        part = bound[:, left : left + TILE]
        part += word_gumbel_bound(token_words(streams[:, None], np.arange(left, left + part.shape[1])))
    promising = bound.argmax(axis=1)
    rows = np.arange(len(z))
    highest = bound[rows, promising]
    reached = z[rows, promising] + word_gumbel(token_words(streams, promising))
    # A winner's bound lies between these two, give or take its own rounding: their size is what limits that.
    slack = BOUND_ERROR + ROUNDING * np.maximum(np.abs(highest), np.abs(reached))
    return np.flatnonzero(bound >= (reached - slack).astype(np.float32)[:, None])


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
