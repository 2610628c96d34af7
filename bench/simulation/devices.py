"""Simulated engines, which take the time of a device and generate the synthetic language.

A KV cache slot holds the hash of the text ending there, computed from the slot of the row's predecessor. So a wrong
slot, path or copy gives another text, and other tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from bench.simulation.language import Hashes, following
from evaluation.workers import sleep
from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.layout import RaggedBatch, RaggedPacker
from specdec.engine.kv.slots import Slots
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency
from verifier_service.settings.tuning import DEFAULTS


@dataclass(frozen=True)
class Device:
    """A simulated device. A forward pass over n rows takes `base` + `row` n seconds, and `beyond` more for each row
    past `flat`: a device that reads its weights once for all rows is first memory-bound, then compute-bound."""

    base: float
    row: float
    flat: int = 0
    beyond: float = 0.0

    def seconds(self, rows: float) -> float:
        return self.base + self.row * rows + self.beyond * max(0.0, rows - self.flat)

    def latency(self) -> StepLatency:
        """The step latency, known with certainty: no step explores."""
        tuning = replace(DEFAULTS.latency, certain_error=math.inf)
        return StepLatency(MEASURED_ROWS, [self.seconds(rows) for rows in MEASURED_ROWS], tuning)

    @property
    def most_rows_a_second(self) -> float:
        """Upper limit of rows a second, for passes of any size."""
        return 1.0 / (self.row + self.beyond)


@dataclass(frozen=True)
class Hardware:
    """The devices of a deployment."""

    target: Device
    draft: Device


PRESETS = {
    # 140 GB of weights over a few accelerators: memory reads for 30 ms, compute-bound above 64 rows.
    "70b": Hardware(Device(0.030, 20e-6, 64, 200e-6), Device(0.002, 10e-6, 16, 100e-6)),
    # An 8B target and a draft of 0.5B to 1B, each on an H100: the profile 8b-h100 of `bench device`.
    "8b": Hardware(Device(0.00677, 25e-6), Device(0.0014, 5e-6)),
    # The demo pair on two cores.
    "demo": Hardware(Device(0.0029, 100e-6), Device(0.00125, 50e-6)),
}


SLICE = 0.0005
"""Time slice in seconds of an engine on a shared device while another is waiting."""


class SharedDevice:
    """A device shared by several engines: it works for one at a time, in turns of a SLICE. Switching costs nothing."""

    def __init__(self) -> None:
        self._free = 0.0  # end of the slices requested so far

    def occupy(self, seconds: float) -> None:
        """Run a pass, in a worker; it takes `seconds` if no other engine uses the device."""
        slices = max(1, math.ceil(seconds / SLICE))
        for _ in range(slices):
            now = asyncio.get_running_loop().time()
            self._free = max(now, self._free) + seconds / slices
            sleep(self._free - now)


class SimulatedEngine:
    """A simulated `Engine` with `capacity` slots; `speak` returns logits of texts, `occupy` spends a pass's time."""

    numerics = "simulated"
    exact = True

    def __init__(
        self,
        device: Device,
        speak: Callable[[Hashes], NDArray[np.float32]],
        *,
        capacity: int,
        vocabulary: int,
        occupy: Callable[[float], None] = sleep,
    ) -> None:
        self.capacity = capacity
        self.vocabulary = vocabulary
        self._device = device
        self._occupy = occupy
        self._speak = speak
        self._texts: Hashes = np.zeros(capacity, dtype=np.uint64)

    def packer(self) -> RaggedPacker:
        return RaggedPacker()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        assert isinstance(batch, RaggedBatch)
        self._occupy(self._device.seconds(len(batch.tokens)))
        texts = self._texts
        before = np.where(batch.positions > 0, batch.keys[np.maximum(batch.first + batch.positions - 1, 0)], 0)
        # In order: a row may follow an earlier one of the same batch.
        for token, slot, previous in zip(batch.tokens.tolist(), batch.slots.tolist(), before.tolist(), strict=True):
            texts[slot] = following(int(texts[previous]), token)
        return self._speak(texts[batch.slots[batch.wanted]])

    def copy(self, source: Slots, target: Slots) -> None:
        self._texts[target] = self._texts[source]
