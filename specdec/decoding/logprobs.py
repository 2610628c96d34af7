"""Log-probabilities for the client, from the target's raw logits, before penalties, temperature and truncation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.processing import Logits
from specdec.decoding.truncation import largest


class TokenLogprobs(NamedTuple):
    """The log-probability and the rank of one chosen token, and the most probable tokens, best first."""

    chosen: float
    top_tokens: list[int]
    top_logprobs: list[float]
    rank: int  # 1 plus the number of more probable tokens


def logprobs(logits: Logits, tokens: NDArray[np.int64], tops: Sequence[int]) -> list[TokenLogprobs]:
    """Return the log-probability of each row's chosen token, and the row's `tops` most probable tokens, from float32
    logits [n, V]."""
    totals = _log_totals(logits)
    own = logits[np.arange(len(logits)), tokens]
    chosen = (own - totals).astype(np.float32).tolist()
    ranks = (1 + np.count_nonzero(logits > own[:, None], axis=1)).tolist()
    found: list[TokenLogprobs] = []
    for row, total, logprob, rank, top in zip(logits, totals, chosen, ranks, tops, strict=True):
        ids = largest(row, top) if top else np.zeros(0, dtype=np.int64)
        found.append(TokenLogprobs(logprob, ids.tolist(), (row[ids] - total).astype(np.float32).tolist(), rank))
    return found


def log_softmax(logits: Logits) -> Logits:
    """Return float32 log-probabilities over the last axis of logits [..., V]."""
    return np.asarray(logits - _log_totals(logits)[..., None], dtype=np.float32)


def _log_totals(logits: Logits) -> NDArray[np.float64]:
    """Return float64 [...]: log of the sum of exp over the last axis of float32 logits [..., V].

    The largest weight is exactly 1, so the error of rounding float32 weights (summed in float64) is negligible even if
    the sum of the others is small.
    """
    peak = logits.max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # inf - inf, in rows that are broken anyway
        weights = np.exp(logits - peak)
    # Cast in a copy: inside sum(), the order of summation could depend on how rows fall into its buffers.
    total = weights.astype(np.float64).sum(axis=-1)
    return np.asarray(np.log(total) + peak[..., 0])
