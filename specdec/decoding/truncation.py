"""Top-k, top-p, min-p and typical-p: finds the surviving ids of a row.

The first three keep a prefix of the row's ranking (largest logit first, lower id first among equals), so together they
give one number: how many survive. Only plausible ids are ranked, and only by value. Typical-p then removes ids from
this prefix, the most probable ones too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.sampling import Sampling

Logits = NDArray[np.float32]
Ids = NDArray[np.int64]


def truncates(sampling: Sampling) -> bool:
    return truncates_by_rank(sampling) or sampling.typical_p < 1.0


def truncates_by_rank(sampling: Sampling) -> bool:
    """Return whether only the largest logits survive: by top-k, top-p or min-p."""
    return sampling.top_k > 0 or sampling.top_p < 1.0 or sampling.min_p > 0.0


def survivors(z: Logits, sampling: Sampling) -> Ids:
    """Return the ids, ascending, surviving top-k, then top-p, min-p and typical-p, of float32 logits [V] divided by T.

    Top-k keeps exactly k; top-p the smallest set reaching p of the weight left by top-k, by float32 weights cumulated
    in float64, descending. The largest logit must be finite; one of -inf never survives.
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
    """Return which of the largest logits of n rows survive: a mask [n, k], all False where k logits do not decide it,
    and in rows whose largest logit is not finite.

    Known are the k largest logits z [n, k] of each row, descending, their ids, and the sum of all weights of a row,
    float64 [n]. The result equals that of `survivors` of the whole row, bit by bit, if the sum does.
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
        # top-p is relative to the weight left by top-k, or to the whole row's without one.
        of = np.where((top_k > 0) & (top_k < vocabulary), reached[every, size - 1], totals) if limited else totals
        enough = reached >= (top_p * of)[:, None]  # a row without any True reaches p beyond its k largest
        cut = np.minimum(size, enough.argmax(axis=1) + 1)
        size = np.where((top_p < 1.0) & enough[:, -1], cut, size)
    if any(sampling.min_p > 0.0 for sampling in samplings):
        of_rows = zip(z[:, 0], samplings, strict=True)
        least = [_least(peak, sampling.min_p) if sampling.min_p > 0.0 else -np.inf for peak, sampling in of_rows]
        size = np.minimum(size, (z >= np.array(least)[:, None]).sum(axis=1))
    last = z[every, size - 1]
    if most < vocabulary:
        # An id outside the k largest may survive too, or precede the last known ones among equal logits; and the weight
        # left by top-k may be unknown.
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
    """Return how many of these logits, in descending order, survive; `total` is that of `_superset`."""
    size = min(sampling.top_k or len(ranked), len(ranked))
    if sampling.top_p < 1.0:
        reached = np.cumsum(np.exp(ranked[:size] - ranked[0]), dtype=np.float64)
        wanted = sampling.top_p * (reached[-1] if total is None else total)
        size = min(size, int(np.searchsorted(reached, wanted)) + 1)
    if sampling.min_p > 0.0:
        size = min(size, int(np.count_nonzero(ranked >= _least(ranked[0], sampling.min_p))))
    return size


def _typical(z: Logits, mass: float) -> NDArray[np.bool_]:
    """Return a mask of the smallest set of ids that reaches this probability, the most typical first: those whose
    surprisal, -log p, is closest to the entropy of all (Meister et al. 2023, "Locally typical sampling"). Among
    equals, the first ones. `z`: the finite logits of the survivors of the other truncations, by ascending id.
    """
    logits = z.astype(np.float64)
    logits -= logits.max()
    weights = np.exp(logits)
    total = weights.sum()
    surprisals, probabilities = math.log(total) - logits, weights / total
    entropy = float((probabilities * surprisals).sum())
    # A surprisal above 2 * entropy - min is farther from the entropy than that of the most probable id. Such ids come
    # last, by falling probability. Those below (1 - mass) / n weigh less than 1 - mass together: they are cut off.
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

    Omitted ids come after the last survivor in the ranking. The total is the sum of all weights if top-p is relative to
    that; None if it is relative to the weight left by top-k, or there is no top-p.
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
    return np.flatnonzero(z >= _least(peak, sampling.min_p) if sampling.min_p > 0.0 else z > -np.inf), None


def _least(peak: np.float32, min_p: float) -> np.float64:
    """Return the logit whose probability is min_p times that of `peak`."""
    return np.float64(peak) + math.log(min_p)


def _largest_mask(values: Logits, least: np.float32, size: int) -> NDArray[np.bool_]:
    """Return a mask of the `size` largest `values`, the smallest of which is `least`; the first ones among equals."""
    keep = values >= least
    excess = int(np.count_nonzero(keep)) - size
    if excess:
        keep[np.flatnonzero(values == least)[-excess:]] = False
    return np.asarray(keep)
