"""The choice: turns rows of logits into one token each.

Under the COUPLED rule, draft and verifier both compute

    choice = argmax over surviving v of  z[v] + g(seed, position, v)

where z are the processed logits and g is the shared Gumbel noise. Reproducibility requires a pure function of one row
and its sampling query, never of other rows in the call. TYPICAL chooses in the same way. REJECTION (`rejection.py`) and
CONTRASTIVE (`contrastive.py`) also use the draft's proposal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding import contrastive, rejection
from specdec.decoding.noise import token_words, winners
from specdec.decoding.processing import MAX_ABS_LOGIT, Logits, adjusted, temperatures, tempered
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Rule
from specdec.decoding.truncation import survivors, truncates

Tokens = NDArray[np.int64]

BLOCK = 1 << 17
"""Approximate number of logits processed together, small enough for intermediate results to stay in a core's cache."""


def choose(logits: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Return int64 [n]: the token chosen by each row of float32 logits [n, V].

    A row whose largest processed logit is NaN, infinite or absurdly large chooses the token of this logit, without
    noise: the logit shows the caller that the row is broken. Under CONTRASTIVE a row may be `contrastive.UNDECIDED`.
    """
    count, vocabulary = logits.shape
    tokens = np.empty(count, dtype=np.int64)
    step = max(1, BLOCK // vocabulary)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, count, step):
            block = slice(start, start + step)
            tokens[block] = _choose(logits[block], queries[block])
    return tokens


def sound(chosen: Logits, tokens: Tokens) -> NDArray[np.bool_]:
    """Return bool [n]: which rows are sound, judged by the logits of their chosen tokens. argmax returns the first NaN,
    if any, so a broken row shows in its choice; undecided rows were checked before."""
    return np.asarray((np.abs(chosen) < MAX_ABS_LOGIT) | (tokens == contrastive.UNDECIDED))


def plausible(logits: Logits, queries: Sequence[SamplingQuery]) -> list[Tokens]:
    """Return the plausible tokens of each row of float32 logits [n, V], ascending (CONTRASTIVE)."""
    with np.errstate(over="ignore", invalid="ignore"):
        return [contrastive.plausible(*of_row) for of_row in zip(adjusted(logits, queries), queries, strict=True)]


def _choose(logits: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    z = adjusted(logits, queries)
    tokens = np.asarray(z.argmax(axis=1))
    peaks = z[np.arange(len(z)), tokens]
    groups: dict[Decide, list[int]] = defaultdict(list)
    for row, (query, is_sound) in enumerate(zip(queries, sound(peaks, tokens).tolist(), strict=True)):
        decide = _decider(query.sampler) if is_sound else None
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
    """Return the function that chooses for this sampler; None if plain argmax is enough."""
    if sampler.rule is Rule.CONTRASTIVE:
        return contrastive.decide
    if sampler.sampling.greedy:
        return None
    if sampler.rule is Rule.REJECTION:
        return rejection.decide
    return _draw_truncated if truncates(sampler.sampling) else _draw


def _draw(z: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Choose by Gumbel-max over whole rows."""
    from specdec.decoding.gumbel_pruning import possible_winners  # compiled; only a verifier needs it

    divisors, streams = temperatures([query.sampler.sampling for query in queries]), streams_of(queries)
    possible = possible_winners(z, divisors, streams)
    values = z.ravel()[possible] / divisors[possible // z.shape[1]]
    return winners(values, possible, z.shape[1], streams)


def _draw_truncated(z: Logits, queries: Sequence[SamplingQuery]) -> Tokens:
    """Choose by Gumbel-max among the survivors of truncation."""
    samplings = [query.sampler.sampling for query in queries]
    z = tempered(z, samplings)
    offsets = range(0, z.size, z.shape[1])
    kept = [survivors(*of_row) + offset for *of_row, offset in zip(z, samplings, offsets, strict=True)]
    possible = np.concatenate(kept)
    return winners(z.ravel()[possible], possible, z.shape[1], streams_of(queries))


def streams_of(queries: Sequence[SamplingQuery]) -> NDArray[np.uint64]:
    states = np.array([query.sampler.state for query in queries], dtype=np.uint64)
    return token_words(states, np.array([query.position for query in queries]))  # `noise.stream` of all queries
