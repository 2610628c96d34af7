"""The choice: turns rows of logits into one token each.

Under the COUPLED rule, draft and verifier both compute

    choice = argmax over surviving v of  z[v] + g(seed, position, v)

where z are the processed logits and g is the shared Gumbel noise. All that the system promises about reproducibility
rests on this being a pure function of one row and its sampling query, never of the other rows in the same call. The
other rules (`rejection.py`, `contrastive.py`) also look at what the draft proposes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding import contrastive, rejection
from specdec.decoding.gumbel_max import winners
from specdec.decoding.noise import gumbel, request_state, token_words
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, PenaltyState, adjusted, temperatures, tempered
from specdec.decoding.proposal import Proposal
from specdec.decoding.sampling import USUAL_CONTRAST, Contrast, Rule, Sampling
from specdec.decoding.truncation import survivors, truncates

Tokens = NDArray[np.int64]

BLOCK = 1 << 17
"""Logits, about, that are processed at once: few enough that intermediate results stay in a core's cache."""

MAX_DRAFT_LOGITS = 256
"""Number of a draft's largest logits that are searched for candidates."""

AGREEMENT_SCALE = 0.6
"""Scale of the noise by which a draft's logits are assumed to differ from its target's. For the demo pair, the
likelihood of the target's choices is highest with 0.5 at temperature 0, 0.6 at 0.7 and 0.7 at 1 (fitted once, by
hand)."""


@dataclass(frozen=True)
class RequestSampler:
    """The sampler of one request: its sampling parameters, acceptance rule and end tokens.

    It chooses none of `end_tokens` at positions before `first_end_position`, an absolute position: so `min_tokens` is
    kept.
    """

    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    first_end_position: int = 0
    rule: Rule = Rule.COUPLED
    contrast: Contrast = USUAL_CONTRAST

    def choose(
        self, logits: Logits, position: int, penalty_state: PenaltyState | None, path: Sequence[int] = ()
    ) -> int:
        """Return the token that one row, float32 [V], chooses: `choose` for a single row."""
        return int(choose(logits[None], [SamplingQuery(self, position, penalty_state, path)])[0])

    def scores(
        self, logits: Logits, position: int, penalty_state: PenaltyState | None, path: Sequence[int] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return token ids, ascending, and the values whose argmax is the choice (logits, with noise unless greedy).

        Ids that do not survive are left out or have the value -inf."""
        z = adjusted(logits[None], [SamplingQuery(self, position, penalty_state, path)])
        if self.sampling.greedy:
            return np.arange(len(logits)), z[0].astype(np.float64)
        z = tempered(z, [self.sampling])
        ids = survivors(z[0], self.sampling)
        return ids, z[0, ids] + gumbel(self.sampling.seed, position, ids)

    def draft_candidates(
        self, logits: Logits, position: int, penalty_state: PenaltyState | None, path: Sequence[int], width: int
    ) -> tuple[list[int], list[float]]:
        """Return the `width` likeliest choices of *another* model with the same noise, best first, as
        (tokens, logprobs).

        The other model's logits are assumed to differ from these by noise of a fixed scale, so its choice is
        softmax-distributed, at that scale, over the perturbed logits (measured before the division by T). Only the
        MAX_DRAFT_LOGITS largest logits are searched; a candidate missed there costs acceptance, nothing else. A broken
        row (see `choose`) gives none.
        """
        z = adjusted(logits[None], [SamplingQuery(self, position, penalty_state, path)])[0]
        if not abs(z.max()) < MAX_ABS_LOGIT:
            return [], []
        if len(z) > MAX_DRAFT_LOGITS:
            ids = np.sort(np.argpartition(z, len(z) - MAX_DRAFT_LOGITS)[-MAX_DRAFT_LOGITS:])
            z = z[ids]
        else:
            ids = np.arange(len(z))
        perturbed = z.astype(np.float64)
        if not self.sampling.greedy:
            z = tempered(z[None], [self.sampling])[0]
            kept = survivors(z, self.sampling)
            ids = ids[kept]
            perturbed = self.sampling.temperature * (z[kept] + gumbel(self.sampling.seed, position, ids))
        perturbed /= AGREEMENT_SCALE
        best = np.argsort(-perturbed, kind="stable")[:width]
        best = best[perturbed[best] > -np.inf]
        if not len(best):
            return [], []
        log_total = np.log(np.exp(perturbed - perturbed[best[0]]).sum()) + perturbed[best[0]]
        return ids[best].tolist(), (perturbed[best] - log_total).tolist()

    @cached_property
    def state(self) -> int:
        """The 64-bit state of the request's noise, before a position is mixed in."""
        return request_state(self.sampling.seed)

    @cached_property
    def bias(self) -> tuple[NDArray[np.int64], Logits]:
        bias = self.sampling.logit_bias
        return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)

    @cached_property
    def banned(self) -> NDArray[np.int64]:
        return np.array(sorted(self.sampling.banned_tokens), dtype=np.int64)

    @cached_property
    def ends(self) -> NDArray[np.int64]:
        return np.array(sorted(self.end_tokens), dtype=np.int64)

    @cached_property
    def adjusts(self) -> bool:
        s = self.sampling
        return s.penalises or bool(s.logit_bias) or bool(s.banned_tokens)


class SamplingQuery(NamedTuple):
    """A sampling query: all that decides which token a row of logits chooses at absolute `position`.

    `penalty_state` covers the committed text and is needed if the sampling penalises; `path` holds the candidates
    between the committed text and this position. `proposal` is the draft's proposal for this position, for the rules
    that use one; CONTRASTIVE cannot choose without it.
    """

    sampler: RequestSampler
    position: int
    penalty_state: PenaltyState | None = None
    path: Sequence[int] = ()
    proposal: Proposal | None = None


def choose(logits: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Return int64 [n]: the token that each row of float32 logits [n, V] chooses.

    A row whose largest processed logit is NaN, infinite or absurdly large chooses that token, without noise: from the
    token's logit the caller can see that the row is broken.
    """
    count, vocabulary = logits.shape
    tokens = np.empty(count, dtype=np.int64)
    step = max(1, BLOCK // vocabulary)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, count, step):
            block = slice(start, start + step)
            tokens[block] = _choose(logits[block], queries[block])
    return tokens


def _choose(logits: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    z = adjusted(logits, queries)
    tokens = np.asarray(z.argmax(axis=1))
    peaks = z[np.arange(len(z)), tokens]
    groups: dict[Decide, list[int]] = defaultdict(list)
    for row, (query, sound) in enumerate(zip(queries, (np.abs(peaks) < MAX_ABS_LOGIT).tolist(), strict=True)):
        decide = _decider(query.sampler) if sound else None
        if decide is not None:
            groups[decide].append(row)
    for decide, group in groups.items():
        if len(group) == len(z):
            return decide(z, queries)
        tokens[group] = decide(z[group], [queries[row] for row in group])
    return tokens


Decide = Callable[[Logits, Sequence[SamplingQuery]], Tokens]
"""A function that chooses tokens [n] from processed logits [n, V]."""


def _decider(sampler: RequestSampler) -> Decide | None:
    """Return the function that chooses for this sampler; None if the plain argmax does."""
    if sampler.rule is Rule.CONTRASTIVE:
        return contrastive.decide
    if sampler.sampling.greedy:
        return None
    if sampler.rule is Rule.REJECTION:
        return rejection.decide
    return _draw_truncated if truncates(sampler.sampling) else _draw


def _draw(z: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Choose by Gumbel-max over whole rows."""
    from specdec.decoding.gumbel_pruning import contenders  # compiled; only a verifier needs it

    divisors, streams = temperatures([query.sampler.sampling for query in queries]), streams_of(queries)
    runners = contenders(z, divisors, streams)
    values = z.ravel()[runners] / divisors[runners // z.shape[1]]
    return winners(values, runners, z.shape[1], streams)


def _draw_truncated(z: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Choose by Gumbel-max among the survivors of top-k, top-p and min-p."""
    samplings = [query.sampler.sampling for query in queries]
    z = tempered(z, samplings)
    offsets = range(0, z.size, z.shape[1])
    kept = [survivors(*of_row) + offset for *of_row, offset in zip(z, samplings, offsets, strict=True)]
    runners = np.concatenate(kept)
    return winners(z.ravel()[runners], runners, z.shape[1], streams_of(queries))


def streams_of(queries: Sequence[SamplingQuery]) -> NDArray[np.uint64]:
    states = np.array([query.sampler.state for query in queries], dtype=np.uint64)
    return token_words(states, np.array([query.position for query in queries]))  # `noise.stream` of all queries
