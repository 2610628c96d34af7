"""Top-k, top-p, min-p and typical-p: finds the surviving ids of a row.

The first three keep a prefix of the row's ranking (largest logit first, lower id first among equals), so together they
reduce to one number: how many ids survive. Only ids that may survive are ranked, by sorting their values without the
ids. Typical-p then removes ids from this prefix, including the most probable ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.processing import Logits
from specdec.decoding.sampling import Sampling

Ids = NDArray[np.int64]


def truncates(sampling: Sampling) -> bool:
    return truncates_by_rank(sampling) or sampling.typical_p < 1.0


def truncates_by_rank(sampling: Sampling) -> bool:
    """Return whether only the largest logits survive: by top-k, top-p or min-p."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def survivors(z: Logits, sampling: Sampling) -> Ids:
    """Return, ascending, the ids surviving top-k, then top-p, min-p and typical-p in float32 logits [V] divided by T.

    Top-k keeps exactly k ids; top-p keeps the smallest set that reaches p of the weight left by top-k. Weights are
    float32, summed in float64 in descending order. The largest logit must be finite; a logit of -inf never survives.
    """
    ids, total = _superset(z, sampling)
    if truncates_by_rank(sampling):
        values = z[ids]
        ranked = -np.sort(-values)
        size = _surviving(ranked, total, sampling)
        ids = ids[_largest_mask(values, ranked[size - 1], size)]
    return ids[_typical(z[ids], sampling.typical_p)] if sampling.typical_p < 1.0 else ids


def survivors_of_largest(
    z: Logits, ids: Ids, totals: NDArray[np.float64], vocabulary: int, samplings: Sequence[Sampling]
) -> NDArray[np.bool_]:
    """Return which of the k largest logits of n rows survive: a mask [n, k]. A row is all False if k logits do not
    decide it, or if its largest logit is not finite.

    `z` [n, k] holds the k largest logits of each row, descending; `ids` their ids; `totals`, float64 [n], the sum of
    all weights of each row. `survivors` on the whole row gives the same result if its totals have the same bits.
    """
    every, most = np.arange(len(z)), z.shape[1]
    count = np.full(len(z), most) if z[:, -1].min() > -np.inf else (z > -np.inf).sum(axis=1)
    size, top_k = count, np.array([sampling.top_k for sampling in samplings])
    limited = any(sampling.top_k > 0 for sampling in samplings)
    if limited:
        size = np.where(top_k > 0, np.minimum(top_k, count), count)
    if any(sampling.top_p < 1.0 for sampling in samplings):
        top_p = np.array([sampling.top_p for sampling in samplings])
        reached = np.exp(z - z[:, :1]).cumsum(axis=1, dtype=np.float64)
        # top-p is relative to the weight left by top-k; without top-k, to the whole row's weight.
        of = np.where((top_k > 0) & (top_k < vocabulary), reached[every, size - 1], totals) if limited else totals
        enough = reached >= (top_p * of)[:, None]  # a row without any True reaches p beyond its k largest
        cut = np.minimum(size, enough.argmax(axis=1) + 1)
        size = np.where((top_p < 1.0) & enough[:, -1], cut, size)
    if any(sampling.min_p > 0.0 for sampling in samplings):
        least = np.array([_least(peak, sampling) for peak, sampling in zip(z[:, 0], samplings, strict=True)])
        size = np.minimum(size, (z >= least[:, None]).sum(axis=1))
    last = z[every, size - 1]
    if most < vocabulary:
        # An id outside the k largest may survive too, or precede the last listed ones among equal logits. The weight
        # left by top-k may also be unknown.
        unknown = ~(last > z[:, -1])
        if limited:
            is_nucleus = np.array([sampling.top_p < 1.0 for sampling in samplings])
            unknown |= is_nucleus & (top_k > most) & (top_k < vocabulary)
        size = np.where(unknown & (count == most), 0, size)
    size = np.where(np.isfinite(z[:, 0]), size, 0)
    kept: NDArray[np.bool_] = np.arange(most) < size[:, None]
    equal = z[every, np.minimum(size, most - 1)] == last
    if equal.any():
        for row in (equal & (size > 0) & (size < count)).nonzero()[0]:  # among equals, the lowest ids survive
            order = np.argsort(ids[row, : count[row]])
            kept[row, order] = _largest_mask(z[row, order], last[row], int(size[row]))
    for row, sampling in enumerate(samplings):
        if sampling.typical_p < 1.0 and size[row]:
            own = kept[row].nonzero()[0]
            own = own[ids[row, own].argsort()]  # as in `survivors`, since sums and ties depend on the order
            kept[row, own] = _typical(z[row, own], sampling.typical_p)
    return kept


def _surviving(ranked: Logits, total: float | None, sampling: Sampling) -> int:
    """Return how many of these logits, in descending order, survive. `total`: as returned by `_superset`."""
    size = min(sampling.top_k or len(ranked), len(ranked))
    if sampling.top_p < 1.0:
        reached = np.cumsum(np.exp(ranked[:size] - ranked[0]), dtype=np.float64)
        wanted = sampling.top_p * (reached[-1] if total is None else total)
        size = min(size, int(np.searchsorted(reached, wanted)) + 1)
    if (least := _least(ranked[0], sampling)) > -np.inf:
        size = min(size, int(np.count_nonzero(ranked >= least)))
    return size


def _typical(z: Logits, mass: float) -> NDArray[np.bool_]:
    """Return a mask of the smallest set of ids that reaches this probability, most typical first. The most typical ids
    are those whose surprisal, -log p, is closest to the entropy (Meister et al. 2023, "Locally typical sampling"); ties
    go to the first. `z`: the finite logits of the survivors of the other truncations, by ascending id.
    """
    logits = z.astype(np.float64)
    logits -= logits.max()
    weights = np.exp(logits)
    total = weights.sum()
    surprisals, probabilities = math.log(total) - logits, weights / total
    entropy = float((probabilities * surprisals).sum())
    # An id with a surprisal above 2 * entropy - min is farther from the entropy than the most probable id. Such ids
    # come last, by falling probability. Those with a probability below (1 - mass) / n together weigh less than 1 - mass
    # and are cut off.
    near = surprisals <= 2.0 * entropy - surprisals.min()
    possible = (near | (probabilities >= (1.0 - mass) / len(z))).nonzero()[0]
    order = possible[np.abs(surprisals[possible] - entropy).argsort(kind="stable")]
    size = int(np.searchsorted(probabilities[order].cumsum(), mass)) + 1
    kept = np.zeros(len(z), dtype=np.bool_)
    kept[order[:size]] = True
    return kept


def largest(row: NDArray[np.floating], count: int) -> Ids:
    """Return int64 [count]: the ids of a row's largest values, descending, lower ids first among equals."""
    at = max(len(row) - count, 0)
    ids = np.flatnonzero(row >= np.partition(row, at)[at])
    return np.asarray(ids[np.argsort(-row[ids], kind="stable")[:count]])


def _superset(z: Logits, sampling: Sampling) -> tuple[Ids, float | None]:
    """Return a superset of the survivors that is cheap to find, ascending, and the total weight for top-p.

    Omitted ids rank after the last survivor. The total is the sum of all weights if top-p is relative to that; None if
    it is relative to the weight left by top-k, or if there is no top-p.
    """
    if 0 < sampling.top_k < len(z):
        at = len(z) - sampling.top_k
        return np.flatnonzero((z >= np.partition(z, at)[at]) & (z > -np.inf)), None
    peak = z.max()
    if sampling.top_p < 1.0:
        weights = np.exp(z - peak)
        total = float(weights.sum(dtype=np.float64))
        # At most V tokens are lighter than this, so together they weigh less than the (1 - p) cut off by top-p.
        return np.flatnonzero(weights >= (1.0 - sampling.top_p) * total / len(z)), total
    least = _least(peak, sampling)
    return np.flatnonzero(z >= least if least > -np.inf else z > -np.inf), None


def _least(peak: np.float32, sampling: Sampling) -> float:
    """Return the smallest logit that min-p keeps, whose probability is min_p times that of `peak`; -inf without min-p.
    It is a NumPy float64, since a comparison with float32 logits would round a Python float."""
    return np.float64(peak) + math.log(sampling.min_p) if sampling.min_p > 0.0 else -np.inf


def _largest_mask(values: Logits, least: np.float32, size: int) -> NDArray[np.bool_]:
    """Return a mask of the `size` largest `values`, the smallest being `least`; among equals, the first ones."""
    keep = values >= least
    excess = int(np.count_nonzero(keep)) - size
    if excess:
        keep[np.flatnonzero(values == least)[-excess:]] = False
    return np.asarray(keep)
