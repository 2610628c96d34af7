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
    from specdec.decoding.choice import Ask

Logits = NDArray[np.float32]

LIMIT = float(np.finfo(np.float32).max)

ABSURD = 1e30
"""Logits of this size come from a broken model; below it, none overflows float32 when divided by T."""


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


def temperatures(samplings: Sequence[Sampling]) -> Logits:
    """float32 [n], the largest of which stands for all above it."""
    return np.array([min(s.temperature, LIMIT) for s in samplings], dtype=np.float32)


def tempered(z: Logits, samplings: Sequence[Sampling]) -> Logits:
    """Divided by each row's temperature, in float32."""
    return np.asarray(z / temperatures(samplings)[:, None], dtype=np.float32)


def adjusted(logits: Logits, asks: Sequence[Ask]) -> Logits:
    """Penalties, bias and bans; the caller's rows are left alone."""
    if not any(ask.chooser.adjusts or ask.position < ask.chooser.first_end_position for ask in asks):
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
        ids, bias = chooser.bias
        z[:, ids] += bias
    if sampling.banned_tokens:
        z[:, chooser.banned] = -np.inf
    for row, ask in zip(z, asks, strict=True):
        if ask.position < chooser.first_end_position:
            row[chooser.ends] = -np.inf


def _penalised(logits: Logits, counts: NDArray[np.integer], sampling: Sampling) -> Logits:
    """Of tokens that the text holds: float32 [..., k]; `counts` [k] of them are output."""
    penalty = np.float32(sampling.repetition_penalty)
    z = np.where(logits > 0, logits / penalty, logits * penalty)
    z -= np.float32(sampling.frequency_penalty) * counts.astype(np.float32)
    z -= np.float32(sampling.presence_penalty) * (counts > 0).astype(np.float32)
    return z
