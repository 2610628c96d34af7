"""An engine on virtual time: a pass takes its real time, plus the real time of the worker's own code before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from evaluation.workers import host_seconds, sleep
from specdec.decoding.draft_logits import DraftLogits
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.engine import Engine, GpuSampling, Launch, Pass, draft_pass_of
from specdec.engine.kv.slots import Slots

T = TypeVar("T")


Timed = Callable[[Callable[[], StepLogits]], StepLogits]
"""Runs a pass, and advances the virtual clock by its time."""


@dataclass(frozen=True)
class TimedPass:
    """A pass that is launched only when its logits are requested: the virtual clock stands still while the worker runs,
    so a pass cannot overlap with it."""

    launch: Callable[[], Pass]
    timed: Timed

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        return self.timed(lambda: self.launch().logits(asked))


class TimedEngine:
    """An engine on a device `speed` times as fast as this machine's, for workers on virtual time. It samples on the GPU
    if the inner engine does."""

    def __init__(self, inner: Engine, speed: float = 1.0, pass_seconds: float | None = None) -> None:
        """With `pass_seconds` every pass takes this long, with any number of rows, and the worker's own code takes no
        time."""
        self.capacity = inner.capacity
        self.vocabulary = inner.vocabulary
        self.numerics = inner.numerics
        self.exact = inner.exact
        self.busy = 0.0  # virtual seconds in passes
        self._inner = inner
        self._speed = speed
        self._pass_seconds = pass_seconds
        if isinstance(inner, GpuSampling):
            launch = inner.launch
            self.launch: Launch = lambda batch: TimedPass(lambda: launch(batch), self._timed)

    def packer(self) -> Packer:
        return self._inner.packer()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return self._timed(lambda: self._inner.forward(batch))

    def forward_shortlists(self, batch: PackedBatch) -> DraftLogits:
        return self._timed(lambda: draft_pass_of(self._inner)(batch))

    def copy(self, source: Slots, target: Slots) -> None:
        self._inner.copy(source, target)

    def _timed(self, run: Callable[[], T]) -> T:
        """Run a pass, and advance the virtual clock by its time."""
        host = host_seconds()
        begin = time.perf_counter()
        result = run()
        seconds = (time.perf_counter() - begin) / self._speed
        if self._pass_seconds is not None:
            host, seconds = 0.0, self._pass_seconds
        self.busy += seconds
        sleep(host + seconds)
        return result
