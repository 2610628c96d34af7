"""What a request does to logits before anything is chosen, the same under every rule: penalties, bias, bans, and the
division by the temperature."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.sampling import Sampling

if TYPE_CHECKING:
    from specdec.decoding.choice import SamplingQuery

Logits = NDArray[np.float32]

LIMIT = float(np.finfo(np.float32).max)

MAX_ABS_LOGIT = 1e30
"""Logits of this size come from a broken model; below it, none overflows float32 when divided by T."""


class PenaltyState:
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


def temperatures(samplings: Sequence[Sampling]) -> Logits:
    """float32 [n], the largest of which stands for all above it."""
    return np.array([min(s.temperature, LIMIT) for s in samplings], dtype=np.float32)


def tempered(z: Logits, samplings: Sequence[Sampling]) -> Logits:
    """Divided by each row's temperature, in float32."""
    return np.asarray(z / temperatures(samplings)[:, None], dtype=np.float32)


def adjusted(logits: Logits, queries: Sequence[SamplingQuery]) -> Logits:
    """Penalties, bias and bans; the caller's rows are left alone."""
    if not any(query.sampler.adjusts or query.position < query.sampler.first_end_position for query in queries):
        return logits
    z = logits.copy()
    start = 0
    for _, run in itertools.groupby(queries, key=lambda query: (id(query.sampler), id(query.penalty_state))):
        of_run = list(run)
        rows = slice(start, start + len(of_run))
        _adjust(z[rows], logits[rows], of_run)
        start = rows.stop
    return z


def _adjust(z: Logits, logits: Logits, queries: Sequence[SamplingQuery]) -> None:
    """In place, for rows of one chooser and one history; `logits` are the same rows and stay what they are."""
    sampler, penalty_state = queries[0].sampler, queries[0].penalty_state
    sampling = sampler.sampling
    if sampling.penalises:
        if penalty_state is None:
            raise ValueError("penalties need the history of the text")
        ids = np.flatnonzero(penalty_state.seen)
        z[:, ids] = _penalised(z[:, ids], penalty_state.output_counts[ids], sampling)
        for row, raw, query in zip(z, logits, queries, strict=True):
            if query.path:  # its tokens count as output, in this row alone
                ids, more = np.unique(query.path, return_counts=True)
                row[ids] = _penalised(raw[ids], penalty_state.output_counts[ids] + more, sampling)
    if sampling.logit_bias:
        ids, bias = sampler.bias
        z[:, ids] += bias
    if sampling.banned_tokens:
        z[:, sampler.banned] = -np.inf
    for row, query in zip(z, queries, strict=True):
        if query.position < sampler.first_end_position:
            row[sampler.ends] = -np.inf


def _penalised(logits: Logits, counts: NDArray[np.integer], sampling: Sampling) -> Logits:
    """Of tokens that the text holds: float32 [..., k]; `counts` [k] of them are output."""
    penalty = np.float32(sampling.repetition_penalty)
    z = np.where(logits > 0, logits / penalty, logits * penalty)
    z -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    z -= np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
    return z
