"""Systems that take steps, and the median time of a step.

All have random weights of the same shape, and compute the logits of every new token. The texts' keys and values are in
the cache before the step; their contents do not affect the time.
"""

from __future__ import annotations

import statistics
import time
from typing import Protocol

import numpy as np

from bench.engine.device import Device
from bench.engine.shapes import Combination
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Engine, launch_of
from verifier_service.costs.step_latency import GREEDY


class SteppedSystem(Protocol):
    """A system under test that takes steps."""

    name: str
    repeated: bool  # a median needs several calls of `step`

    def step(self, what: Combination) -> tuple[float, float]:
        """Take one step; return the seconds until the call returned, and until the device was done."""


def packed(engine: Engine, what: Combination) -> PackedBatch:
    """Return a step of this size. Its texts lie side by side in the engine's KV cache, starting at slot 1."""
    packer = engine.packer()
    for session in range(what.sessions):
        first = 1 + session * (what.context + what.tokens)
        slots = np.arange(first, first + what.context + what.tokens)
        rows = packer.add_rows([1 + session] * what.tokens, what.context, slots[what.context :])
        packer.add_path(slots, rows)
        for row in rows:
            packer.want(row)
    return packer.pack()


class SpecdecEngine:
    """An engine of specdec, from `load_engine`."""

    name = "specdec"
    repeated = True

    def __init__(self, engine: Engine, device: Device) -> None:
        self._engine = engine
        self._launch = launch_of(engine)
        self._device = device

    def step(self, what: Combination) -> tuple[float, float]:
        """Take one step: packing, forward pass, and greedy choices if the engine makes them on its device."""

        def run() -> None:
            batch = packed(self._engine, what)
            self._launch(batch).logits(lambda: dict.fromkeys(range(what.rows), GREEDY))

        return self._device.timed(run)


def median_step(system: SteppedSystem, what: Combination, seconds: float, repeats: int) -> dict[str, float]:
    """Return the median milliseconds of 3 to `repeats` steps, limited to about `seconds`, after two warm-up steps. A
    system that is not `repeated` is called once, without warm-up."""
    if system.repeated:
        system.step(what)
        system.step(what)
    begin = time.perf_counter()
    host, whole = [], []
    for number in range(repeats):
        if number >= 3 and time.perf_counter() - begin > seconds:
            break
        returned, done = system.step(what)
        host.append(returned)
        whole.append(done)
        if not system.repeated:
            break
    return {"host_ms": 1e3 * statistics.median(host), "ms": 1e3 * statistics.median(whole), "steps": len(whole)}
