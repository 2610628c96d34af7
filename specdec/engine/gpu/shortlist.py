"""Shortlists: the part of GPU logits that the host needs to choose tokens under COUPLED and TYPICAL.

The constructor of each kind launches its work on the GPU; `parts` are the tensors [n, ...] to fetch, and `decided`
chooses from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.choice import Tokens, streams_of
from specdec.decoding.noise import token_words, winners, word_gumbel
from specdec.decoding.processing import MAX_ABS_LOGIT
from specdec.decoding.query import SamplingQuery
from specdec.decoding.sampling import Rule
from specdec.decoding.truncation import survivors_of_largest, truncates, truncates_by_rank
from specdec.engine.gpu import logits_processing, noise
from specdec.engine.gpu.staging import upload

UNDECIDED = -1
"""Placeholder for a token whose choice needs the whole row."""

CLOSEST = 4
"""Ids fetched per row, by highest score on the GPU. Two would suffice, since the GPU's scores are off by an ulp or
two."""

RANKED = 1024
"""Ids fetched per row: the largest logits. Top-k, top-p and min-p nearly always cut among these."""

FEW = 64
"""Ids per row in the first search for survivors."""

AT_ONCE = 64
"""Rows searched together: few enough for intermediate results to stay in a core's cache."""

BLOCK = 1 << 22
"""Approximate number of scores computed together, with about thirty bytes of temporary memory each."""

Arrays = Sequence[NDArray[Any]]


class Narrowing(Protocol):
    """A shortlist of rows of float32 logits [n, V], for one sampling query per row."""

    parts: list[Tensor]

    def __init__(self, logits: Tensor, queries: Sequence[SamplingQuery]) -> None: ...

    def decided(self, parts: Arrays) -> Tokens:
        """Return the choices, int64 [n], or UNDECIDED, given the fetched parts."""


def narrowing(query: SamplingQuery) -> type[Narrowing] | None:
    """Return the kind of shortlist for a sampling query; None if the whole row is needed."""
    if query.sampler.rule not in (Rule.COUPLED, Rule.TYPICAL):
        return None
    if query.sampler.sampling.greedy:
        return Greedy
    if truncates_by_rank(query.sampler.sampling):
        return Ranked
    return None if truncates(query.sampler.sampling) else Drawn  # typical-p alone may remove the largest logits


class Greedy:
    """A shortlist for greedy sampling: the largest logit of each row, the first of equal ones."""

    def __init__(self, logits: Tensor, queries: Sequence[SamplingQuery]) -> None:
        self.parts = list(logits_processing.adjusted(logits, queries).max(dim=1))

    def decided(self, parts: Arrays) -> Tokens:
        peaks, tokens = parts
        return _where_sound(peaks, tokens)


class Drawn:
    """A shortlist for sampling without truncation: the ids with the highest scores (logit plus noise). The host
    computes these scores again."""

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
        order = np.argsort(ids, axis=1)  # the lowest id wins ties
        ids, z = np.take_along_axis(ids, order, axis=1), np.take_along_axis(z, order, axis=1)
        return _where_sound(peaks, _best(ids, z, self._streams))


class Ranked:
    """A shortlist for truncated sampling: the largest logits of a row, and the row's total weight. The host checks
    whether the cut lies among these logits.

    The GPU's exponentials may be an ulp off the host's, and the GPU sums in another order. The two totals differ by at
    most a ten-millionth of the weight. If the top-p cut falls between the two, one id more or fewer survives than if
    the host had summed the whole row.
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
        peaks, *largest = parts
        return _where_sound(peaks, of_largest(self._asks, self._vocabulary, *largest))


def of_largest(
    queries: Sequence[SamplingQuery],
    vocabulary: int,
    z: NDArray[np.float32],
    ids: NDArray[np.int64],
    totals: NDArray[np.float64],
) -> Tokens:
    """Return the choices by truncated sampling, int64 [n], or UNDECIDED.

    `z` [n, k]: the largest logits of each row, descending and divided by T; `ids`: their token ids; `totals`: the
    weight of the whole row relative to the weight of its largest logit.
    """
    samplings, streams = [query.sampler.sampling for query in queries], streams_of(queries)
    tokens = np.full(len(queries), UNDECIDED, dtype=np.int64)
    for width in (FEW, z.shape[1]):  # in most rows, few ids survive
        undecided = np.flatnonzero(tokens == UNDECIDED)
        for begin in range(0, len(undecided), AT_ONCE):
            rows = undecided[begin : begin + AT_ONCE]
            with np.errstate(invalid="ignore"):  # rows that are not sound
                kept = survivors_of_largest(
                    z[rows, :width], ids[rows, :width], totals[rows], vocabulary, [samplings[row] for row in rows]
                )
            known = kept.any(axis=1)
            if not known.any():
                continue
            offsets = vocabulary * (np.cumsum(known) - 1)  # `winners` takes the known rows as one flattened array
            possible, values = (offsets[:, None] + ids[rows, :width])[kept], z[rows, :width][kept]
            tokens[rows[known]] = winners(values, possible, vocabulary, streams[rows[known]])
    return tokens


def _best(ids: NDArray[np.int64], z: NDArray[np.float32], streams: NDArray[np.uint64]) -> Tokens:
    """Return the id with the largest score in each row of ids [n, k], ascending, with logits z."""
    scores = z + word_gumbel(token_words(streams[:, None], ids))
    return np.asarray(np.take_along_axis(ids, scores.argmax(axis=1)[:, None], axis=1)[:, 0])


def _where_sound(peaks: NDArray[np.float32], tokens: Tokens) -> Tokens:
    """Return the tokens, with UNDECIDED where a row's largest logit is NaN, infinite or absurdly large: the host
    examines the whole of such a row."""
    return np.where(np.abs(peaks) < MAX_ABS_LOGIT, tokens, UNDECIDED)
