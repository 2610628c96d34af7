"""Block verification of a chain of draws (Sun et al. 2024, "Block verification accelerates speculative decoding",
algorithm 2).

Under REJECTION the draws x1, ..., xn of a chain may be tested one by one. Tested as a whole they are accepted at least
as often, and the tokens are distributed as the target's all the same (theorems 1 and 2). With p and q the distributions
of target and draft after the first i draws, r(0) = 1 and r(i) = min(1, r(i-1) p(xi) / q(xi)):

    m(i) = sum over v of max(0, r(i) p(v) - q(v))
    h(i) = m(i) / (m(i) + 1 - r(i)),  at the end of the chain r(n)

Prefix i passes its test with probability h(i), independently of the others, and the longest one that passes is
accepted (prefix 0 always passes). The next token is drawn from norm(max(0, r p - q)) after it, or from p after the
whole chain. By induction from the end, the accepted prefix has at least i draws with probability r(i), given the first
i draws, hence accepted and drawn tokens together follow p.

Where the chain ends may depend on the draws before the end, never on those behind it: m(i) averages over what the next
draw could have been. The random numbers are functions of (seed, position of the first draw, i): a later block that
begins behind a rejection tests its draws with numbers of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from specdec.decoding.noise import DOMAIN_BLOCK, DOMAIN_RESIDUAL, uniform
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted
from specdec.decoding.query import SamplingQuery
from specdec.decoding.rejection import (
    Ids,
    Weights,
    draft_probabilities,
    draw,
    probabilities_of,
    target_probabilities,
)


class ChainQuery(NamedTuple):
    """A query about a chain of draws: the rows with the logits after its prefixes, shortest first, and the sampling
    queries of these rows. The proposal of each is the chain's next draw; the last row may have none, if it follows the
    whole chain."""

    rows: Sequence[int]
    queries: Sequence[SamplingQuery]

    @property
    def draws(self) -> list[int]:
        return [query.proposal.tokens[0] for query in self.queries if query.proposal is not None]


class AcceptedPrefix(NamedTuple):
    """The outcome: the number of accepted draws, and the token drawn after them. None: nothing was drawn, because the
    chain is accepted as far as there were rows, or the next row is broken."""

    length: int
    token: int | None


class Prefix(NamedTuple):
    """A prefix of a chain, given the next draw."""

    acceptance: float
    """Probability that it passes its test, h(i)."""
    ratio: float
    """r(i + 1), for the prefix with the next draw."""


def prefix(ratio: float, p: Weights, q: Weights, drawn: int) -> Prefix:
    """Return the prefix with this `ratio`, r(i). `p` and `q` [n] are the probabilities of the draft's tokens after it,
    `drawn` the next draw's index among them. Other tokens have q = 0, so m(i) = r(i) - sum of min(r(i) p, q)."""
    mass = max(0.0, ratio - float(np.minimum(ratio * p, q).sum()))
    # With a ratio of 1 the test always passes, even if no mass is left.
    acceptance = mass / (mass + 1.0 - ratio) if ratio < 1.0 else 1.0
    return Prefix(acceptance, min(1.0, ratio * float(p[drawn] / q[drawn])))


def residual(ratio: float, p: Weights, q: Weights) -> Weights:
    """Return the unnormalised distribution of the token after a prefix with this ratio, [n], from the probabilities of
    all tokens that the target permits."""
    left = np.maximum(ratio * p - q, 0.0)
    return left if left.any() else p  # all zero only up to rounding, with q equal to p


def verify(logits: Iterable[Logits], queries: Sequence[SamplingQuery]) -> AcceptedPrefix:
    """Verify a chain of draws. `logits`: float32 [V] of its rows, consumed one by one, as long as a longer prefix can
    be accepted; `queries`: of these rows, as in `ChainQuery`."""
    first, ratio = queries[0], 1.0
    seed = first.sampler.sampling.seed
    longest: tuple[int, float, Ids, Weights] | None = None  # of the prefixes that pass: length, ratio, the target's p
    for depth, (row, query) in enumerate(zip(logits, queries, strict=False)):
        number = uniform(seed, first.position, DOMAIN_BLOCK, depth)
        with np.errstate(over="ignore", invalid="ignore"):
            z = adjusted(row[None], [query])[0]
        sound = abs(z.max()) < MAX_ABS_LOGIT
        if query.proposal is None or not sound:  # the end of the chain: a broken row decides alone, and shows it
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
