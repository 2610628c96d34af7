"""Passes on virtual time: each engine's own kind of step, with a prescribed duration."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from evaluation import virtual_time
from evaluation.timed_engine import TimedEngine
from evaluation.workers import OnVirtualTime
from specdec.decoding.step_logits import HostLogits
from specdec.engine.engine import launch_of
from tests.verifier_service.fakes import Announced, DeviceTextEngine, TextEngine

T = TypeVar("T")


class Idle(OnVirtualTime):
    def turn(self) -> None:
        """Wait for calls."""


def in_a_worker(call: Callable[[], T]) -> tuple[T, float]:
    """Return the result of a call in a worker, and the virtual seconds that it took."""

    async def main() -> tuple[T, float]:
        worker = Idle("idle")
        worker.start()
        begin = time.monotonic()
        result = await worker.call(call)
        seconds = time.monotonic() - begin
        await worker.end()
        return result, seconds

    return virtual_time.run(main())


@pytest.mark.parametrize(("inner", "logits"), [(TextEngine(1), HostLogits), (DeviceTextEngine(1), Announced)])
def test_a_step_samples_where_the_engine_does_and_takes_its_time(inner: TextEngine, logits: type) -> None:
    engine = TimedEngine(inner, pass_seconds=0.5)
    packer = engine.packer()
    packer.want(packer.add_row(3, 0, 1))
    packer.add_path(np.array([1]), [0])
    got, seconds = in_a_worker(lambda: launch_of(engine)(packer.pack()).logits(dict))
    assert type(got) is logits
    assert seconds == pytest.approx(0.5)
    assert engine.busy == 0.5
