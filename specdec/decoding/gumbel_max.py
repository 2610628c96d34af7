"""The Gumbel-max argmax: the token with the largest z[v] + g(v), for many rows at once.

Noise is computed in float64 only for ids that can win (`gumbel_pruning.py`). The result is exact: an omitted id
provably loses. No row's winner depends on the other rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import token_words, word_gumbel


def winners(
    values: NDArray[np.float32], possible: NDArray[np.int64], vocabulary: int, streams: NDArray[np.uint64]
) -> NDArray[np.int64]:
    """Return int64 [n]: for each of n rows over one vocabulary the token with the largest sum of logit and noise, the
    lowest id on ties.

    `possible` holds the ids that can win: indices into the flattened rows, ascending, at least one for each row.
    `values` are their logits, divided by the temperature; `streams` [n] are the noise streams of the rows.
    """
    rows, ids = np.divmod(possible, vocabulary)
    if len(possible) == len(streams):
        return np.asarray(ids)  # one per row: nothing to decide
    scores = values + word_gumbel(token_words(streams[rows], ids))
    every = np.arange(len(streams))
    best = np.maximum.reduceat(scores, np.searchsorted(rows, every))
    won = np.flatnonzero(scores == best[rows])
    if len(won) == len(streams):
        return np.asarray(ids[won])
    return np.asarray(np.minimum.reduceat(ids[won], np.searchsorted(rows[won], every)))
