"""The ideal system is limited only by its own and its draft's step times."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.speed.step_times import ROWS, StepTimes, of_answer
from tests.models import make


@pytest.fixture(scope="module")
def step_times(tmp_path_factory: pytest.TempPathFactory) -> StepTimes:
    folder: Path = tmp_path_factory.mktemp("models")
    return StepTimes(make("llama", folder / "target"), None, "float32", text=16)


def test_steps_of_every_size_are_measured(step_times: StepTimes) -> None:
    times = step_times.measure()
    cores = os.cpu_count() or 1
    assert {f"{cores}/{rows}" for rows in ROWS} <= times.keys()
    assert all(seconds > 0 for seconds in times.values())


def test_the_ideal_has_no_overhead(step_times: StepTimes) -> None:
    cores = os.cpu_count() or 1
    times = {f"{threads}/{rows}": 0.001 * rows for threads in (cores, max(1, cores - 1)) for rows in ROWS}
    plain = step_times.ideal(times, 4, 10, 400, tokens=1.0, candidates=0.0, drafted=0.0)
    assert plain == pytest.approx(400 / (0.04 + 100 * 0.004))
    crowd = step_times.ideal(times, 2 * ROWS[-1], 1, 2 * ROWS[-1], tokens=1.0, candidates=0.0, drafted=0.0)
    assert crowd == pytest.approx(1 / (0.001 + 0.001))  # beyond the measured range
    guessed = step_times.ideal(times, 2, 10, 60, tokens=3.0, candidates=2.0, drafted=0.0)
    assert guessed == pytest.approx(60 / (0.02 + 10 * 0.006))
    drafted = step_times.ideal(times | {"draft": 0.01}, 1, 10, 30, tokens=3.0, candidates=3.0, drafted=2.0)
    assert drafted == pytest.approx(30 / (0.01 + 10 * 0.02))  # two steps of the draft outlast the target's rows


def test_an_answer_is_told_per_step() -> None:
    assert of_answer(30, 10, 25, {"remote_draft": 15, "ngram": 5}) == {"tokens": 3.0, "candidates": 2.5, "drafted": 1.5}
