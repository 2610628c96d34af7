"""The Gumbel race: for many rows at once, the token with the largest z[v] + g(v).

The noise is only worked out in float64 for ids that can win (`gumbel_pruning.py`). Nothing is approximate: what is left
out provably loses. No row's winner depends on the other rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import token_words, word_gumbel


def winners(
    values: NDArray[np.float32], runners: NDArray[np.int64], vocabulary: int, streams: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """int64 [n]: of each of n rows over one vocabulary the token with the largest score, the lowest on ties.

    `runners` are indices into the flattened rows, ascending, at least one of each row; `values` are their logits,
    divided by the temperature, and `streams` [n] those of the rows' noise.
    """
    rows, ids = np.divmod(runners, vocabulary)
    if len(runners) == len(streams):
        return np.asarray(ids)  # each is the only one of its row
    scores = values + word_gumbel(token_words(streams[rows], ids))
    every = np.arange(len(streams))
    best = np.maximum.reduceat(scores, np.searchsorted(rows, every))
    won = np.flatnonzero(scores == best[rows])
    first = won[np.searchsorted(rows[won], every)]
    return np.asarray(ids[first])
