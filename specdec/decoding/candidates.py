"""Candidates of a draft: the tokens that another model with the same noise is likeliest to choose."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import gumbel
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted, tempered
from specdec.decoding.query import SamplingQuery
from specdec.decoding.truncation import survivors

MAX_DRAFT_LOGITS = 256
"""Number of a draft's largest logits that are searched for candidates."""

COLUMNS, LEAST_HEIGHT = 16, 4
"""Columns that a row is laid out in, for each logit that is sought, and the least number of logits in a column for
which that is worth it."""

AGREEMENT_SCALE = 0.6
"""Scale of the noise by which a draft's logits are assumed to differ from its target's. For the demo pair, the
likelihood of the target's choices is highest with 0.5 at temperature 0, 0.6 at 0.7 and 0.7 at 1 (fitted once, by
hand)."""


def draft_candidates(logits: Logits, query: SamplingQuery, width: int) -> tuple[list[int], list[float]]:
    """Return the `width` likeliest choices of *another* model with the same noise, best first, as
    (tokens, logprobs).

    The other model's logits are assumed to differ from these by noise of a fixed scale, so its choice is
    softmax-distributed, at that scale, over the perturbed logits (measured before the division by T). Only the
    MAX_DRAFT_LOGITS largest logits are searched; a candidate missed there costs acceptance, nothing else. A broken
    row (see `choose`) gives none.
    """
    sampling = query.sampler.sampling
    z = adjusted(logits[None], [query])[0]
    if not abs(z.max()) < MAX_ABS_LOGIT:
        return [], []
    ids = _largest(z, MAX_DRAFT_LOGITS)
    z = z[ids]
    perturbed = z.astype(np.float64)
    if not sampling.greedy:
        z = tempered(z[None], [sampling])[0]
        kept = survivors(z, sampling)
        ids = ids[kept]
        perturbed = sampling.temperature * (z[kept] + gumbel(sampling.seed, query.position, ids))
    perturbed /= AGREEMENT_SCALE
    best = np.argsort(-perturbed, kind="stable")[:width]
    best = best[perturbed[best] > -np.inf]
    if not len(best):
        return [], []
    log_total = np.log(np.exp(perturbed - perturbed[best[0]]).sum()) + perturbed[best[0]]
    return ids[best].tolist(), (perturbed[best] - log_total).tolist()


def _largest(z: Logits, count: int) -> NDArray[np.int64]:
    """Return the ids, ascending, of the `count` largest of a row's logits z [V].

    Long rows are laid out in columns. At least `count` logits reach the count-th largest of the columns' maxima, and
    few others do; only these are partitioned. Maxima take a third of the time that partitioning the row takes."""
    if len(z) <= count:
        return np.arange(len(z))
    ids, columns = None, COLUMNS * count
    if len(z) >= LEAST_HEIGHT * columns:
        height = len(z) // columns
        maxima = z[: height * columns].reshape(height, columns).max(axis=0)
        ids = np.flatnonzero(z >= np.partition(maxima, columns - count)[columns - count])
    values = z if ids is None else z[ids]
    best = np.sort(np.argpartition(values, len(values) - count)[-count:])
    return best if ids is None else ids[best]
