"""The REJECTION rule: speculative sampling (Leviathan et al. 2023, "Fast inference from transformers via speculative
decoding", algorithm 1; Chen et al. 2023, "Accelerating large language model decoding with speculative sampling").

A candidate x, drawn from the draft's q, is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn
from norm(max(0, p - q)). Without a candidate it is drawn from p. The tokens are distributed as p for any q, under two
conditions: x was drawn from this very q, so q is truncated and rounded *before* the draw; and whether x was offered
does not depend on x.

Each position has three random numbers, one for each purpose. They are functions of (seed, position), so a restarted
draft draws the same candidates; tokens still depend on what was offered. At temperature 0 this rule equals COUPLED, and
COUPLED is used.

`verifier_service/verification/tree_verification.py` applies a rule along the token trees of a step. Together with this
file it is the whole of speculative sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import DOMAIN_ACCEPT, DOMAIN_DRAFT, DOMAIN_RESIDUAL, uniform
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted, tempered
from specdec.decoding.proposal import WIDTH, DraftDistribution, Proposal
from specdec.decoding.query import SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.truncation import largest, survivors

Ids = NDArray[np.int64]
Weights = NDArray[np.float64]


def propose(logits: Logits, query: SamplingQuery) -> Proposal | None:
    """Draw a candidate from a draft's float32 logits [V]; None if they are broken after penalties, bias and bans."""
    sampling = query.sampler.sampling
    with np.errstate(over="ignore", invalid="ignore"):
        z = adjusted(logits[None], [query])
    if not abs(z.max()) < MAX_ABS_LOGIT:
        return None
    z = tempered(z, [sampling])[0]
    ids, weights = _plausible(z, sampling)
    if len(ids) > WIDTH:
        kept = np.sort(largest(weights, WIDTH))
        ids, weights = ids[kept], weights[kept]
    values = weights.astype(np.float16)
    row = DraftDistribution(ids[values > 0], values[values > 0])
    drawn = draw(row.values.astype(np.float64), uniform(sampling.seed, query.position, DOMAIN_DRAFT))
    assert row.ids is not None
    return Proposal(int(row.ids[drawn]), row)


def decide(z: Logits, queries: Sequence[SamplingQuery]) -> Ids:
    """Return int64 [n]: the tokens chosen from processed logits [n, V], given before the division by T."""
    z = tempered(z, [query.sampler.sampling for query in queries])
    return np.array([_decide(row, query) for row, query in zip(z, queries, strict=True)], dtype=np.int64)


def _decide(z: Logits, query: SamplingQuery) -> int:
    sampling, position = query.sampler.sampling, query.position
    ids, weights = _plausible(z, sampling)
    p = weights / weights.sum()
    if query.proposal is not None and query.proposal.token is not None:
        q = _on(ids, query.proposal.row)
        offered = ids == query.proposal.token
        q_offered = _probability(query.proposal.row, query.proposal.token)
        # u < p / q without dividing by q. Strictly less, and u is never 0: a token with p = 0 is never accepted.
        if uniform(sampling.seed, position, DOMAIN_ACCEPT) * q_offered < p[offered].sum():
            return query.proposal.token
        residual = np.maximum(p - q, 0.0)
        p = residual if residual.any() else p  # zero only if q equals p, up to rounding
    return int(ids[draw(p, uniform(sampling.seed, position, DOMAIN_RESIDUAL))])


def draw(weights: Weights, number: float) -> int:
    """Return the index drawn by a uniform number in (0, 1), by inverting the cumulative weights."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, number * cumulated[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])  # the product rounded up to the total


def acceptance(row: DraftDistribution) -> float:
    """Return the estimated probability that a draw from this distribution is accepted, a function of the distribution
    alone.

    A confident draft is mostly right; an uncertain one still overlaps with its target.
    """
    q = row.values.astype(np.float64)
    return float(1.0 - (1.0 - q.max() / q.sum()) * DISAGREEMENT)


DISAGREEMENT = 0.4
"""Fraction of the probability mass outside the draft's most probable token that is assumed to be rejected."""


def _plausible(z: Logits, sampling: Sampling) -> tuple[Ids, Weights]:
    """Return the surviving ids, ascending, and their weights, the largest of which is 1."""
    ids = survivors(z, sampling)
    return ids, np.exp(z[ids].astype(np.float64) - z[ids].max())


def _on(ids: Ids, row: DraftDistribution) -> Weights:
    """Return the draft distribution's probabilities of these ids, which must be ascending."""
    assert row.ids is not None
    values = row.values.astype(np.float64)
    at = np.searchsorted(ids, row.ids)
    known = at < len(ids)
    known[known] = ids[at[known]] == row.ids[known]
    q = np.zeros(len(ids))
    q[at[known]] = values[known] / values.sum()
    return q


def _probability(row: DraftDistribution, token: int) -> float:
    assert row.ids is not None
    values = row.values.astype(np.float64)
    return float(values[row.ids == token].sum() / values.sum())
