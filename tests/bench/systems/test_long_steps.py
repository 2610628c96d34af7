"""Long steps: each engine's own kind of step, delayed as on a slower device."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bench.systems.long_steps import at_least, with_long_steps
from specdec.decoding.step_logits import HostLogits
from specdec.engine.engine import launch_of
from tests.verifier_service.fakes import Announced, DeviceTextEngine, TextEngine, ThreadedTextEngine

SECONDS = 0.02


@pytest.mark.parametrize(
    ("inner", "logits"),
    [(TextEngine(1), HostLogits), (ThreadedTextEngine(1), HostLogits), (DeviceTextEngine(1), Announced)],
)
def test_a_step_samples_where_the_engine_does_and_is_long(inner: TextEngine, logits: type) -> None:
    engine = with_long_steps(inner, at_least(SECONDS))
    packer = engine.packer()
    packer.want(packer.add_row(3, 0, 1))
    packer.add_path(np.array([1]), [0])
    begin = time.perf_counter()
    got = launch_of(engine)(packer.pack()).logits(dict)
    assert time.perf_counter() - begin >= SECONDS
    assert type(got) is logits
