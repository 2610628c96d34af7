"""The choice rule: from rows of logits to one token each, the same at draft and verifier.

    choice = argmax over surviving v of  z[v] + g(seed, position, v)

where z are the processed logits and g is the shared Gumbel noise. Everything the system promises
about reproducibility rests on this being a pure function: of one row and of what is asked about it, never
of the other rows that happen to be answered with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.noise import gumbel, stream
from specdec.decoding.race import contenders, winners
from specdec.decoding.sampling import Sampling
from specdec.decoding.truncation import survivors, truncates

Logits = NDArray[np.float32]
Tokens = NDArray[np.int64]

BLOCK = 1 << 17
"""About so many logits are worked on at once: what is made of them stays in a core's cache."""

ABSURD = 1e30
"""Logits of this size come from a broken model; below it, none overflows float32 when divided by T."""

LOOKED_AT = 256
"""Of a draft's logits so many, the largest, are looked at for candidates."""

AGREEMENT_SCALE = 0.6
"""How far a draft's logits are taken to be from its target's. Under the demo pair's draft, the likelihood of
the target's choices is highest with 0.5 at temperature 0, 0.6 at 0.7 and 0.7 at 1 (fitted once, by hand)."""


class History:
    """Which tokens a text holds, for the penalties: prompt as a set, output as counts."""

    def __init__(self, vocabulary: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        self.seen = np.zeros(vocabulary, dtype=bool)
        self.output_counts = np.zeros(vocabulary, dtype=np.int32)
        self.seen[np.asarray(prompt, dtype=np.int64)] = True
        self.extend(output)

    def extend(self, output: Sequence[int]) -> None:
        ids = np.asarray(output, dtype=np.int64)
        self.seen[ids] = True
        np.add.at(self.output_counts, ids, 1)


@dataclass(frozen=True)
class Chooser:
    """The choice rule of one request.

    `end_tokens` are not chosen while the text is shorter than `first_end_position`, an absolute
    position: the way `min_tokens` is kept.
    """

    sampling: Sampling
    end_tokens: frozenset[int] = frozenset()
    first_end_position: int = 0

    def choose(self, logits: Logits, position: int, history: History | None, path: Sequence[int] = ()) -> int:
        """`choose` for one row, float32 [V]."""
        return int(choose(logits[None], [Ask(self, position, history, path)])[0])

    def scores(
        self, logits: Logits, position: int, history: History | None, path: Sequence[int] = ()
    ) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Token ids, ascending, and what the choice is the argmax of; ids that do not survive are left out, or
        have the score -inf."""
        z = _adjusted(logits[None], [Ask(self, position, history, path)])
        if self.sampling.greedy:
            return np.arange(len(logits)), z[0].astype(np.float64)
        z = _tempered(z, [self.sampling])
        ids = survivors(z[0], self.sampling)
        return ids, z[0, ids] + gumbel(self.sampling.seed, position, ids)

    def preferences(
        self, logits: Logits, position: int, history: History | None, path: Sequence[int], width: int
    ) -> tuple[list[int], list[float]]:
        """The `width` likeliest choices of *another* model with the same noise, best first, as
        (tokens, log-probabilities).

        The other model's logits are taken to differ from these by noise of a fixed scale, so that its choice
        is softmax-distributed over the perturbed logits (measured before the division by T) at that scale.
        Only the LOOKED_AT largest logits are looked at; what that misses costs acceptance, nothing else. A
        broken row (see `choose`) gives none.
        """
        z = _adjusted(logits[None], [Ask(self, position, history, path)])[0]
        if not abs(z.max()) < ABSURD:
            return [], []
        if len(z) > LOOKED_AT:
            ids = np.sort(np.argpartition(z, len(z) - LOOKED_AT)[-LOOKED_AT:])
            z = z[ids]
        else:
            ids = np.arange(len(z))
        perturbed = z.astype(np.float64)
        if not self.sampling.greedy:
            z = _tempered(z[None], [self.sampling])[0]
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
    def _bias(self) -> tuple[NDArray[np.int64], Logits]:
        bias = self.sampling.logit_bias
        return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)

    @cached_property
    def _banned(self) -> NDArray[np.int64]:
        return np.array(sorted(self.sampling.banned_tokens), dtype=np.int64)

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.array(sorted(self.end_tokens), dtype=np.int64)

    @cached_property
    def _adjusts(self) -> bool:
        s = self.sampling
        return s.penalises or bool(s.logit_bias) or bool(s.banned_tokens)


class Ask(NamedTuple):
    """What is asked about one row of logits: the token at absolute `position`.

    `history` covers the committed text and is needed if the sampling penalises; `path` are the guessed
    tokens between it and this position.
    """

    chooser: Chooser
    position: int
    history: History | None = None
    path: Sequence[int] = ()


def choose(logits: Logits, asks: Sequence[Ask]) -> Tokens:
    """int64 [n]: the token that each row of float32 logits [n, V] chooses.

    A row whose largest processed logit is a NaN, infinite or absurd chooses that one, without noise: the caller
    can see by the token's logit that the row is broken.
    """
    count, vocabulary = logits.shape
    tokens = np.empty(count, dtype=np.int64)
    step = max(1, BLOCK // vocabulary)
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, count, step):
            block = slice(start, start + step)
            tokens[block] = _choose(logits[block], asks[block])
    return tokens


def _choose(logits: Logits, asks: Sequence[Ask]) -> Tokens:
    z = _adjusted(logits, asks)
    tokens = np.asarray(z.argmax(axis=1))
    peaks = z[np.arange(len(z)), tokens]
    whole: list[int] = []
    truncated: list[int] = []
    for row, (ask, sound) in enumerate(zip(asks, (np.abs(peaks) < ABSURD).tolist(), strict=True)):
        if sound and not ask.chooser.sampling.greedy:
            (truncated if truncates(ask.chooser.sampling) else whole).append(row)
    for group in (whole, truncated):
        if group:
            tokens[group] = _draw(z[group], [asks[row] for row in group], truncated=group is truncated)
    return tokens


def _draw(z: Logits, asks: Sequence[Ask], *, truncated: bool) -> Tokens:
    """int64 [n]: the tokens of processed logits [n, V], with noise."""
    samplings = [ask.chooser.sampling for ask in asks]
    z = _tempered(z, samplings)
    streams = np.array([stream(ask.chooser.sampling.seed, ask.position) for ask in asks], dtype=np.uint64)
    if not truncated:
        return winners(z, streams, contenders(z, streams))
    offsets = range(0, z.size, z.shape[1])
    kept = [survivors(*of_row) + offset for *of_row, offset in zip(z, samplings, offsets, strict=True)]
    return winners(z, streams, np.concatenate(kept))


def _tempered(z: Logits, samplings: Sequence[Sampling]) -> Logits:
    """Divided by each row's temperature, in float32 (the largest of which stands for all above it)."""
    limit = float(np.finfo(np.float32).max)
    temperatures: Logits = np.array([[min(s.temperature, limit)] for s in samplings], dtype=np.float32)
    return np.asarray(z / temperatures, dtype=np.float32)


def _adjusted(logits: Logits, asks: Sequence[Ask]) -> Logits:
    """Penalties, bias and bans; the caller's rows are left alone."""
    if not any(ask.chooser._adjusts or ask.position < ask.chooser.first_end_position for ask in asks):
        return logits
    z = logits.copy()
    start = 0
    for _, run in itertools.groupby(asks, key=lambda ask: (id(ask.chooser), id(ask.history))):
        of_run = list(run)
        rows = slice(start, start + len(of_run))
        _adjust(z[rows], logits[rows], of_run)
        start = rows.stop
    return z


def _adjust(z: Logits, logits: Logits, asks: Sequence[Ask]) -> None:
    """In place, for rows of one chooser and one history; `logits` are the same rows and stay what they are."""
    chooser, history = asks[0].chooser, asks[0].history
    sampling = chooser.sampling
    if sampling.penalises:
        if history is None:
            raise ValueError("penalties need the history of the text")
        ids = np.flatnonzero(history.seen)
        z[:, ids] = _penalised(z[:, ids], history.output_counts[ids], sampling)
        for row, raw, ask in zip(z, logits, asks, strict=True):
            if ask.path:  # its tokens count as output, in this row alone
                ids, more = np.unique(ask.path, return_counts=True)
                row[ids] = _penalised(raw[ids], history.output_counts[ids] + more, sampling)
    if sampling.logit_bias:
        ids, bias = chooser._bias
        z[:, ids] += bias
    if sampling.banned_tokens:
        z[:, chooser._banned] = -np.inf
    for row, ask in zip(z, asks, strict=True):
        if ask.position < chooser.first_end_position:
            row[chooser._ends] = -np.inf


def _penalised(logits: Logits, counts: NDArray[np.integer], sampling: Sampling) -> Logits:
    """Of tokens that the text holds: float32 [..., k]; `counts` [k] of them are output."""
    penalty = np.float32(sampling.repetition_penalty)
    z = np.where(logits > 0, logits / penalty, logits * penalty)
    z -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    z -= np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
    return z
