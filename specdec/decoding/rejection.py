"""The REJECTION rule: speculative sampling (Leviathan et al. 2023, "Fast inference from transformers via speculative
decoding", algorithm 1; Chen et al. 2023, "Accelerating large language model decoding with speculative sampling").

A candidate x, drawn from the draft's q, is accepted with probability min(1, p(x) / q(x)); otherwise the token is drawn
from norm(max(0, p - q)). Without a candidate it is drawn from p. Several candidates x1, x2, ... of one position are
drawn without replacement and tested in this order. After a rejection p becomes norm(max(0, p - q)), q loses the
rejected token and is normalised again (Chen et al. 2024, "Sequoia: scalable, robust, and hardware-aware speculative
decoding", algorithm 2; Jeon et al. 2024, "Recursive speculative decoding").

The tokens follow p for any q, under two conditions. Candidates must be drawn from this very q, so q is truncated and
rounded *before* the draw. The decision to test a candidate must depend neither on that candidate nor on a later draw.

Here positions are decided one by one; `block_verification.py` decides a chain of draws as a whole.

Random numbers are functions of (seed, position), with one stream for each purpose. The number for a draw also depends
on the text before it. Block verification reads draws below a rejection, then drops them with their text; the draws of
the replacement text must be independent of them. A restarted draft draws the same candidates, but tokens still depend
on which candidates were offered, and in which step. At temperature 0 this rule equals COUPLED, and COUPLED is used.

`verifier_service/verification/tree_verification.py` applies a rule along the token trees of a step. It, this file and
`block_verification.py` are the whole of speculative sampling.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import DOMAIN_ACCEPT, DOMAIN_DRAFT, DOMAIN_RESIDUAL, uniform
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted, tempered
from specdec.decoding.proposal import WIDTH, DraftDistribution, Proposal
from specdec.decoding.query import SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.truncation import Ids, largest, survivors

Weights = NDArray[np.float64]


def propose(logits: Logits, query: SamplingQuery, count: int = 1) -> Proposal | None:
    """Draw up to `count` candidates from a draft's float32 logits [V], without replacement; fewer if fewer tokens
    survive. None if the logits are broken after penalties, bias and bans."""
    sampling = query.sampler.sampling
    with np.errstate(over="ignore", invalid="ignore"):
        z = adjusted(logits[None], [query])
    if not abs(z.max()) < MAX_ABS_LOGIT:
        return None
    z = tempered(z, [sampling])[0]
    ids, weights = _surviving_weights(z, sampling)
    if len(ids) > WIDTH:
        kept = np.sort(largest(weights, WIDTH))
        ids, weights = ids[kept], weights[kept]
    values = weights.astype(np.float16)
    row = DraftDistribution(ids[values > 0], values[values > 0])
    return Proposal(tuple(_draws(row, query, count)), row)


def _draws(row: DraftDistribution, query: SamplingQuery, count: int) -> Iterator[int]:
    """Yield up to `count` different tokens, drawn one after the other."""
    assert row.ids is not None
    weights = row.values.astype(np.float64)
    for index in range(min(count, len(weights))):
        number = uniform(query.sampler.sampling.seed, query.position, DOMAIN_DRAFT, query.text_hash, index)
        drawn = draw(weights, number)
        weights[drawn] = 0.0
        yield int(row.ids[drawn])


def decide(z: Logits, queries: Sequence[SamplingQuery]) -> Ids:
    """Return int64 [n]: the tokens chosen from processed logits [n, V] that are not yet divided by T."""
    return np.array([_decide(row, query) for row, query in zip(z, queries, strict=True)], dtype=np.int64)


def _decide(z: Logits, query: SamplingQuery) -> int:
    seed, position = query.sampler.sampling.seed, query.position
    ids, p = target_probabilities(z, query.sampler.sampling)
    if query.proposal is not None:
        for index, (token, probability) in enumerate(trials(ids, p, query.proposal)):
            # Strictly less, and a uniform number is never 0: a token with p = 0 is never accepted.
            if uniform(seed, position, DOMAIN_ACCEPT, index) < probability:
                return token
    return int(ids[draw(p, uniform(seed, position, DOMAIN_RESIDUAL))])


def trials(ids: Ids, p: Weights, proposal: Proposal) -> Iterator[tuple[int, float]]:
    """Yield each candidate of a position and the probability of accepting it, given that the earlier ones were
    rejected.

    `p` [n] are the target's probabilities of `ids`, ascending. Resuming the iterator rejects the last candidate: `p`
    becomes the residual distribution, in place.
    """
    drafted, q = draft_probabilities(proposal.row)
    for token in proposal.tokens:
        place = int(drafted.searchsorted(token))
        yield token, min(1.0, float(p[ids == token].sum() / q[place]))
        residual = np.maximum(p - probabilities_of(ids, drafted, q), 0.0)
        if residual.any():  # all zero only if q equals p, up to rounding
            p[:] = residual / residual.sum()
        q[place] = 0.0
        q /= q.sum() or 1.0  # 1.0: q has no token left


def draw(weights: Weights, number: float) -> int:
    """Return the index drawn by a uniform number in (0, 1), by inverting the cumulative weights."""
    cumulated = np.cumsum(weights)
    index = int(np.searchsorted(cumulated, number * cumulated[-1], side="right"))
    return index if index < len(weights) else int(np.flatnonzero(weights)[-1])  # the product rounded up to the total


def acceptance(row: DraftDistribution) -> float:
    """Return the estimated probability that a draw from this distribution is accepted. It depends on the distribution
    alone.

    A confident draft is mostly right; an uncertain one still overlaps with its target.
    """
    q = row.values.astype(np.float64)
    return float(1.0 - (1.0 - q.max() / q.sum()) * DISAGREEMENT)


def acceptances(row: DraftDistribution, count: int) -> Weights:
    """Return float64 [count]: the estimated probabilities that the first, second, ... draw from this distribution is
    the accepted one. They depend on the distribution alone."""
    first = acceptance(row)
    later = (1.0 - first) * LATER_ACCEPTANCE * (1.0 - LATER_ACCEPTANCE) ** np.arange(count - 1)
    return np.asarray(np.maximum(np.concatenate([[first], later]), LEAST_ACCEPTANCE))


DISAGREEMENT = 0.4
"""Assumed rejected fraction of the probability mass outside the draft's most probable token."""

LATER_ACCEPTANCE = 0.3
"""Assumed probability that a draw is accepted after all earlier ones were rejected. It is low, because the residual
consists of tokens that the draft under-rates; calibration corrects it by rank."""

LEAST_ACCEPTANCE = 1e-9
"""Lower limit of an estimate: if the draft is certain of its first draw, the second would have probability 0, with an
infinite logarithm."""


def target_probabilities(z: Logits, sampling: Sampling) -> tuple[Ids, Weights]:
    """Return the ids that survive truncation, ascending, and the target's probabilities of them. `z`: processed logits
    [V], not yet divided by T."""
    ids, weights = _surviving_weights(tempered(z[None], [sampling])[0], sampling)
    return ids, weights / weights.sum()


def draft_probabilities(row: DraftDistribution) -> tuple[Ids, Weights]:
    """Return the ids of a draft's distribution, ascending, and its probabilities of them."""
    assert row.ids is not None
    values = row.values.astype(np.float64)
    return row.ids, values / values.sum()


def probabilities_of(wanted: Ids, ids: Ids, probabilities: Weights) -> Weights:
    """Return float64, shaped as `wanted`: the probability of each wanted id, from the probabilities of `ids`; 0 for
    missing ids. Both lists ascend; the shorter one is looked up in the longer one."""
    few, many = (wanted, ids) if len(wanted) < len(ids) else (ids, wanted)
    at = np.searchsorted(many, few)
    known = at < len(many)
    known[known] = many[at[known]] == few[known]
    found = np.zeros(len(wanted))
    if few is wanted:
        found[known] = probabilities[at[known]]
    else:
        found[at[known]] = probabilities[known]
    return found


def _surviving_weights(z: Logits, sampling: Sampling) -> tuple[Ids, Weights]:
    """Return the surviving ids, ascending, and their weights, scaled so that the largest is 1."""
    ids = survivors(z, sampling)
    return ids, np.exp(z[ids].astype(np.float64) - z[ids].max())
