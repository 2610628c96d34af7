"""The Gumbel race: for many rows at once, the token with the largest z[v] + g(v).

The noise is only worked out in float64 for ids that can win (`contenders.py`). Nothing is approximate: what is left
out provably loses. No row's winner depends on the other rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import token_words, word_gumbel


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
