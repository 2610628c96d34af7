"""An engine whose steps last as long as a larger model's would, on a device of its own."""

from __future__ import annotations

import time

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.engine import CpuThreads, Engine, cpu_threads
from specdec.engine.kv.slots import Slots


class LongSteps:
    """An engine that wraps `inner` and makes every forward pass take at least `seconds`.

    It sleeps for the rest, which takes no processor time of the host, as if a GPU did the work; another row costs
    nothing until the inner engine takes longer."""

    def __init__(self, inner: Engine, seconds: float) -> None:
        self._inner = inner
        self._seconds = seconds
        self.capacity = inner.capacity
        self.vocabulary = inner.vocabulary
        self.numerics = inner.numerics
        self.exact = inner.exact

    def packer(self) -> Packer:
        return self._inner.packer()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        end = time.monotonic() + self._seconds
        logits = self._inner.forward(batch)
        time.sleep(max(0.0, end - time.monotonic()))
        return logits

    def copy(self, source: Slots, target: Slots) -> None:
        self._inner.copy(source, target)


class LongCpuSteps(LongSteps):
    """Long steps of an engine whose number of threads can be changed."""

    def __init__(self, inner: Engine, threaded: CpuThreads, seconds: float) -> None:
        super().__init__(inner, seconds)
        self.threads = threaded.threads
        self.use_threads = threaded.use_threads


def with_long_steps(engine: Engine, seconds: float) -> Engine:
    """Return an engine that does what this one does, in long steps."""
    threaded = cpu_threads(engine)
    return LongSteps(engine, seconds) if threaded is None else LongCpuSteps(engine, threaded, seconds)
