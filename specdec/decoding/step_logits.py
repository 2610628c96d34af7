"""The rows of a step: a forward pass has brought logits, and sessions ask what they choose.

Where the logits lie is nobody's business but theirs: here they are in memory, on a device they stay where they are
(`specdec.engine.gpu.sampler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.choice import SamplingQuery, Tokens, choose
from specdec.decoding.logprobs import Logprobs, logprobs
from specdec.decoding.processing import Logits


class StepLogits(Protocol):
    """Of n rows of logits over one vocabulary."""

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        """By `choice.choose` the token that each of these rows chooses, and whether its logit is finite: if not, the
        row is broken."""

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[Logprobs]:
        """As `logprobs.logprobs`, of these rows."""


class HostLogits:
    """In memory."""

    def __init__(self, logits: Logits) -> None:
        """float32 [n, V]."""
        self._logits = logits

    def choose(self, rows: Sequence[int], queries: Sequence[SamplingQuery]) -> tuple[Tokens, NDArray[np.bool_]]:
        count = len(rows)
        in_place = list(rows) == list(range(count))  # there may be others behind them
        here = self._logits[:count] if in_place else self._logits[np.asarray(rows)]
        tokens = choose(here, queries)
        return tokens, np.isfinite(here[np.arange(len(rows)), tokens])  # a NaN is every argmax's first choice

    def logprobs(self, rows: Sequence[int], tokens: Tokens, tops: Sequence[int]) -> list[Logprobs]:
        return logprobs(self._logits[np.asarray(rows)], tokens, tops)
