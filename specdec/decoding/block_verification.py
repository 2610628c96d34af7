"""Block verification of a chain of draws (Sun et al. 2024, "Block verification accelerates speculative decoding",
algorithm 2).

Under REJECTION the draws x1, ..., xn of a chain may be tested one by one. Testing them as a whole accepts, in
expectation, at least as many, and the tokens still follow the target's distribution (theorems 1 and 2). Let p and q be
the distributions of target and draft after the first i draws, y the next draw, r(0) = 1 and
r(i+1) = min(1, r(i) p(y) / q(y)):

    m(i) = sum over v of max(0, r(i) p(v) - q(v))
    h(i) = m(i) / (m(i) + 1 - r(i)),  at the end of the chain h(n) = r(n)

Prefix i passes its test with probability h(i), independently of the others. The longest prefix that passes is accepted;
prefix 0 always passes. The next token is drawn from norm(max(0, r p - q)) after it, or from p after the whole chain. By
induction from the end: given the first i draws, the accepted prefix includes them with probability r(i). Hence accepted
and drawn tokens together follow p.

Whether the chain continues may depend on the draws so far, never on the next one: m(i) averages over all its values.
The random numbers are functions of (seed, position of the first draw, i), so a later block that begins after a
rejection tests its draws with different numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specdec.decoding.noise import DOMAIN_BLOCK, DOMAIN_RESIDUAL, uniform
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted
from specdec.decoding.query import SamplingQuery
from specdec.decoding.rejection import (
    Weights,
    draft_probabilities,
    draw,
    probabilities_of,
    target_probabilities,
)
from specdec.decoding.truncation import Ids


class ChainQuery(NamedTuple):
    """A query about a chain of draws. `rows`: rows of logits after its prefixes, shortest first; `queries`: their
    sampling queries. Each query's proposal is the chain's next draw; the last row, if it follows the whole chain, may
    have none."""

    rows: Sequence[int]
    queries: Sequence[SamplingQuery]

    @property
    def draws(self) -> list[int]:
        return [query.proposal.tokens[0] for query in self.queries if query.proposal is not None]


class AcceptedPrefix(NamedTuple):
    """The outcome: the number of accepted draws, and the token drawn after them. The token is None if nothing was
    drawn: all rows are used up and all draws accepted, or the next row is broken."""

    length: int
    token: int | None


class Prefix(NamedTuple):
    """A prefix of a chain, with the next draw known."""

    acceptance: float
    """Probability h(i) that the prefix passes its test."""
    ratio: float
    """r(i + 1), the ratio of the prefix extended by the next draw."""


def prefix(ratio: float, p: Weights, q: Weights, drawn: int) -> Prefix:
    """Return the prefix with this `ratio`, r(i). `p` and `q` [n] are the target's and the draft's probabilities of the
    draft's tokens after it; `drawn` is the next draw's index. Tokens not listed have q = 0, so m(i) = r(i) - sum of
    min(r(i) p, q)."""
    mass = max(0.0, ratio - float(np.minimum(ratio * p, q).sum()))
    # With a ratio of 1 the test always passes, even if no mass is left.
    acceptance = mass / (mass + 1.0 - ratio) if ratio < 1.0 else 1.0
    return Prefix(acceptance, min(1.0, ratio * float(p[drawn] / q[drawn])))


def residual(ratio: float, p: Weights, q: Weights) -> Weights:
    """Return the unnormalised distribution of the token after a prefix with this ratio, [n]. `p` and `q` are the
    probabilities of all tokens that survive the target's truncation."""
    left = np.maximum(ratio * p - q, 0.0)
    return left if left.any() else p  # all zero only if q equals p, up to rounding


def verify(logits: Iterable[Logits], queries: Sequence[SamplingQuery]) -> AcceptedPrefix:
    """Verify a chain of draws. `logits`: float32 [V] of each row, consumed only while a longer prefix can be accepted;
    `queries`: as in `ChainQuery`."""
    first, ratio = queries[0], 1.0
    seed = first.sampler.sampling.seed
    longest: tuple[int, float, Ids, Weights] | None = None  # passing prefix: length, ratio, the target's ids and p
    for depth, (row, query) in enumerate(zip(logits, queries, strict=False)):
        number = uniform(seed, first.position, DOMAIN_BLOCK, depth)
        with np.errstate(over="ignore", invalid="ignore"):
            z = adjusted(row[None], [query])[0]
        sound = abs(z.max()) < MAX_ABS_LOGIT
        if query.proposal is None or not sound:  # end of the chain, or a broken row
            if number < ratio and not sound:
                return AcceptedPrefix(depth, None)
            if number < ratio:
                longest = depth, ratio, *target_probabilities(z, query.sampler.sampling)
            break
        ids, p = target_probabilities(z, query.sampler.sampling)
        drafted, q = draft_probabilities(query.proposal.row)
        found = prefix(ratio, probabilities_of(drafted, ids, p), q, int(drafted.searchsorted(query.proposal.tokens[0])))
        if number < found.acceptance:
            longest = depth, ratio, ids, p
        ratio = found.ratio
        if not ratio:
            break
    else:
        if uniform(seed, first.position, DOMAIN_BLOCK, len(queries)) < ratio:
            return AcceptedPrefix(len(queries), None)
    assert longest is not None  # prefix 0 always passes
    length, ratio, ids, p = longest
    proposal = queries[length].proposal
    if proposal is not None:
        p = residual(ratio, p, probabilities_of(ids, *draft_probabilities(proposal.row)))
    number = uniform(seed, first.position + length, DOMAIN_RESIDUAL)
    return AcceptedPrefix(length, int(ids[draw(p, number)]))
