"""Step logits: the logits of one forward pass, which answer the sampling queries of sessions.

Only the class itself knows where its logits are: here they are in host memory; those of a device stay on it
(`specdec.engine.gpu.sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.choice import BLOCK, Tokens, choose
from specdec.decoding.logprobs import Logprobs, logprobs
from specdec.decoding.processing import Logits
from specdec.decoding.query import SamplingQuery


class StepLogits(Protocol):
    """The step logits: n rows over one vocabulary."""

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        """Return the tokens that these rows choose, by `choice.choose`, and which rows are sound: those whose token has
        a finite logit. The others are broken."""

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[Logprobs]:
        """Return the log-probabilities of these rows, as `logprobs.logprobs` does."""


class HostLogits:
    """Step logits in host memory."""

    def __init__(self, logits: Logits) -> None:
        """`logits` are float32 [n, V]."""
        self._logits = logits

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        count = len(rows)
        if list(rows) == list(range(count)):  # rows that are not asked for may follow
            tokens = choose(self._logits[:count], queries)
        else:
            chosen = [choose(self._of(rows[block]), queries[block]) for block in self._blocks(count)]
            tokens = np.concatenate(chosen)
        # a NaN is every argmax's first choice
        return tokens, np.isfinite(self._logits[np.asarray(rows, dtype=np.int64), tokens])

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[Logprobs]:
        blocks = self._blocks(len(rows))
        found = [logprobs(self._of(rows[block]), tokens[block], tops[block]) for block in blocks]
        return list(chain.from_iterable(found))

    def _of(self, rows: Sequence[int]) -> Logits:
        return self._logits[np.asarray(rows, dtype=np.int64)]

    def _blocks(self, rows: int) -> list[slice]:
        """Return slices of rows whose logits may be copied at once: a copy of all would double what a step takes."""
        step = max(1, BLOCK // self._logits.shape[1])
        return [slice(start, start + step) for start in range(0, rows, step)]
