"""An engine whose passes take the time of another device, slower than this machine's processor.

It computes here and sleeps for the rest of each forward pass. Sleeping takes no processor time, as if a GPU did the
work. So services sharing a few cores seem to have one device each. A file holds the pass times of devices, so that
several processes can share them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.draft_logits import DraftLogits
from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.engine import CpuThreads, Engine, cpu_threads, draft_pass_of
from specdec.engine.kv.slots import Slots
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency

T = TypeVar("T")

Lasting = Callable[[int], float]
"""Returns the seconds of a pass on the device from its number of rows."""


def at_least(seconds: float) -> Lasting:
    """Return a `Lasting` of `seconds` for any pass: rows cost nothing until a pass takes longer on this machine."""
    return lambda _: seconds


class LongSteps:
    """An engine that wraps `inner` and makes every forward pass last at least as long as `lasting` returns."""

    def __init__(self, inner: Engine, lasting: Lasting) -> None:
        self._inner = inner
        self._lasting = lasting
        self.capacity = inner.capacity
        self.vocabulary = inner.vocabulary
        self.numerics = inner.numerics
        self.exact = inner.exact

    def packer(self) -> Packer:
        return self._inner.packer()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return self._lengthened(batch, lambda: self._inner.forward(batch))

    def forward_shortlists(self, batch: PackedBatch) -> DraftLogits:
        return self._lengthened(batch, lambda: draft_pass_of(self._inner)(batch))

    def copy(self, source: Slots, target: Slots) -> None:
        self._inner.copy(source, target)

    def _lengthened(self, batch: PackedBatch, run: Callable[[], T]) -> T:
        """Run a pass over this batch, and return its result once it has lasted long enough in real time, by
        `time.perf_counter`: virtual time replaces `time.monotonic`."""
        end = time.perf_counter() + self._lasting(len(batch.tokens))
        result = run()
        sleep_until(end)
        return result


class LongCpuSteps(LongSteps):
    """Long steps of an engine with a variable number of threads."""

    def __init__(self, inner: Engine, threaded: CpuThreads, lasting: Lasting) -> None:
        super().__init__(inner, lasting)
        self.threads = threaded.threads
        self.use_threads = threaded.use_threads


def sleep_until(end: float) -> None:
    """Sleep until the time `end` (`time.perf_counter`)."""
    time.sleep(max(0.0, end - time.perf_counter()))


def with_long_steps(engine: Engine, lasting: Lasting) -> Engine:
    """Return this engine of a CPU, wrapped to take long steps."""
    threaded = cpu_threads(engine)
    return LongSteps(engine, lasting) if threaded is None else LongCpuSteps(engine, threaded, lasting)


def write_devices(file: Path, latencies: Mapping[str, StepLatency], slower: float) -> None:
    """Write devices by name, with the measured latencies times `slower`."""
    times = {name: [slower * latency.of(rows) for rows in MEASURED_ROWS] for name, latency in latencies.items()}
    file.write_text(json.dumps(times))


def read_device(file: Path, name: str) -> Lasting:
    return StepLatency(MEASURED_ROWS, json.loads(file.read_text())[name]).of
