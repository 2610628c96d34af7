"""Step logits: the logits of one forward pass, which answer the sampling queries of sessions.

Only the class itself knows where its logits are: here they are in host memory; those of a device stay on it
(`specdec.engine.gpu.sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.choice import Tokens, choose
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
        in_place = list(rows) == list(range(count))  # rows that are not asked for may follow
        wanted = self._logits[:count] if in_place else self._logits[np.asarray(rows)]
        tokens = choose(wanted, queries)
        return tokens, np.isfinite(wanted[np.arange(len(rows)), tokens])  # a NaN is every argmax's first choice

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[Logprobs]:
        return logprobs(self._logits[np.asarray(rows)], tokens, tops)
