"""What comes over from a device of rows of logits, enough to choose by the COUPLED rule on the host.

Each kind launches its work on construction; `parts` are tensors [n, ...] to be fetched, `decided` is told them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.choice import SamplingQuery, Tokens, streams_of
from specdec.decoding.noise import token_words, word_gumbel
from specdec.decoding.processing import MAX_ABS_LOGIT
from specdec.decoding.sampling import Rule
from specdec.decoding.truncation import leading, truncates
from specdec.engine.gpu import logits_processing, noise
from specdec.engine.gpu.upload import upload

UNDECIDED = -1
"""In place of a token: the row is wanted in whole."""

CLOSEST = 4
"""Ids of a row whose scores, as worked out on the device, are the highest. They are an ulp or two off there: two would
do."""

RANKED = 1024
"""Ids of a row with the largest logits, among which top-k, top-p and min-p nearly always cut."""

BLOCK = 1 << 22
"""About so many scores are worked out at once: each takes some thirty bytes on the way."""

Arrays = Sequence[NDArray[Any]]


class Narrowing(Protocol):
    """Of rows of float32 logits [n, V], and what is asked of each."""

    parts: list[Tensor]

    def __init__(self, logits: Tensor, queries: Sequence[SamplingQuery]) -> None: ...

    def decided(self, parts: Arrays) -> Tokens:
        """int64 [n]: the choices, or UNDECIDED, by the parts as fetched."""


def narrowing(query: SamplingQuery) -> type[Narrowing] | None:
    """Which kind serves an ask; None: the row is wanted in whole."""
    if query.sampler.rule is not Rule.COUPLED:
        return None
    if query.sampler.sampling.greedy:
        return Greedy
    return Ranked if truncates(query.sampler.sampling) else Drawn


class Greedy:
    """The largest logit, of equal ones the first."""

    def __init__(self, logits: Tensor, queries: Sequence[SamplingQuery]) -> None:
        self.parts = list(logits_processing.adjusted(logits, queries).max(dim=1))

    def decided(self, parts: Arrays) -> Tokens:
        peaks, tokens = parts
        return _where_sound(peaks, tokens)


class Drawn:
    """The ids with the highest scores; the host works these out again."""

    def __init__(self, logits: Tensor, queries: Sequence[SamplingQuery]) -> None:
        z = logits_processing.adjusted(logits, queries)
        peaks = z.amax(dim=1)
        z = logits_processing.tempered(z, queries)
        self._streams = streams_of(queries)
        streams = upload(self._streams.view(np.int64), z.device)
        every = torch.arange(z.shape[1], device=z.device)
        step = max(1, BLOCK // z.shape[1])
        ids = torch.cat(
            [
                (part + noise.gumbel(of_part[:, None], every)).topk(min(CLOSEST, len(every))).indices
                for part, of_part in zip(torch.split(z, step), torch.split(streams, step), strict=True)
            ]
        )
        self.parts = [peaks, ids, z.gather(1, ids)]

    def decided(self, parts: Arrays) -> Tokens:
        peaks, ids, z = parts
        order = np.argsort(ids, axis=1)  # the lowest id on ties
        ids, z = np.take_along_axis(ids, order, axis=1), np.take_along_axis(z, order, axis=1)
        return _where_sound(peaks, _best(ids, z, self._streams))


class Ranked:
    """The largest logits, and the weight of all: whether the cut lies among them, the host sees.

    The device's exponentials may be an ulp off those in memory, and its order of sums is its own. Where top-p falls
    between two such results, a ten-millionth of the weight apart or less, one id more or less survives than in memory.
    """

    def __init__(self, logits: Tensor, queries: Sequence[SamplingQuery]) -> None:
        z = logits_processing.adjusted(logits, queries)
        peaks = z.amax(dim=1)
        z = logits_processing.tempered(z, queries)
        totals = (z - z.amax(dim=1, keepdim=True)).exp().double().sum(dim=1)
        self._asks = queries
        self._vocabulary = z.shape[1]
        self.parts = [peaks, *z.topk(min(RANKED, self._vocabulary)), totals]

    def decided(self, parts: Arrays) -> Tokens:
        tokens = np.full(len(self._asks), UNDECIDED, dtype=np.int64)
        streams = streams_of(self._asks)
        for row, (query, peak, z, ids, total) in enumerate(zip(self._asks, *parts, strict=True)):
            if not abs(peak) < MAX_ABS_LOGIT:
                continue
            kept = leading(z, ids, float(total), self._vocabulary, query.sampler.sampling)
            if kept is not None:
                tokens[row] = _best(ids[None, kept], z[None, kept], streams[row : row + 1])[0]
        return tokens


def _best(ids: NDArray[np.int64], z: NDArray[np.float32], streams: NDArray[np.uint64]) -> Tokens:
    """Of each row of ids [n, k], ascending, with logits z, the one with the largest score."""
    scores = z + word_gumbel(token_words(streams[:, None], ids))
    return np.asarray(np.take_along_axis(ids, scores.argmax(axis=1)[:, None], axis=1)[:, 0])


def _where_sound(peaks: NDArray[np.float32], tokens: Tokens) -> Tokens:
    """A row whose largest logit is no number, infinite or absurd is left to those who look at it in whole."""
    return np.where(np.abs(peaks) < MAX_ABS_LOGIT, tokens, UNDECIDED)
