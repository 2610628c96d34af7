"""Long steps: each engine's own kind of step, delayed as on a slower device."""

from __future__ import annotations

import time

import numpy as np
import pytest

from bench.systems.long_steps import at_least, with_long_steps
from tests.verifier_service.fakes import TextEngine, ThreadedTextEngine

SECONDS = 0.02


@pytest.mark.parametrize("inner", [TextEngine(1), ThreadedTextEngine(1)])
def test_a_step_is_long(inner: TextEngine) -> None:
    engine = with_long_steps(inner, at_least(SECONDS))
    packer = engine.packer()
    packer.want(packer.add_row(3, 0, 1))
    packer.add_path(np.array([1]), [0])
    begin = time.perf_counter()
    assert len(engine.forward(packer.pack())) == 1
    assert time.perf_counter() - begin >= SECONDS
