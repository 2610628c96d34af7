"""The loop shared by all trainings: it saves, evaluates and stops only between two steps."""

from __future__ import annotations

import math
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from specdec.cli.train_draft import tell_gain
from specdec.cli.training import LOOK_SECONDS, Seldom, Stops, TimeLimit, work_on


class Counting:
    """Work that counts its steps, and gets a signal in step `interrupted_at`."""

    unit = "step"
    total = 10

    def __init__(self, interrupted_at: int | None = None, by: signal.Signals = signal.SIGINT) -> None:
        self.done = 0
        self.saved: list[int] = []
        self._interrupted_at, self._by = interrupted_at, by

    @property
    def over(self) -> bool:
        return self.done >= self.total

    def step(self) -> float:
        if self.done == self._interrupted_at:
            signal.raise_signal(self._by)
        self.done += 1
        return self.done / 2

    def describe(self, figure: float) -> str:
        return f"step {self.done} of {self.total}, {figure}"

    def save(self, out: Path) -> None:
        self.saved.append(self.done)


@pytest.fixture
def stops() -> Iterator[Stops]:
    before = {kind: signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM)}
    yield Stops()
    for kind, handler in before.items():
        signal.signal(kind, handler)


def test_work_is_saved_when_it_is_over(stops: Stops, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    work = Counting()
    work_on(work, tmp_path, stops, TimeLimit())
    stops.end()
    assert work.saved == [10]
    assert capsys.readouterr().err == "specdec: step 10 of 10, 5.0\n"


@pytest.mark.parametrize(("by", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_it_after_the_step_at_hand(
    by: signal.Signals, status: int, stops: Stops, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Counting(interrupted_at=3, by=by)
    work_on(work, tmp_path, stops, TimeLimit())
    assert work.saved == [4]
    assert "stopped at step 4 of 10; the same command with --resume continues" in capsys.readouterr().err
    assert signal.getsignal(by) == signal.SIG_DFL  # a second signal ends the process
    with pytest.raises(SystemExit) as ended:
        stops.end()
    assert ended.value.code == status


def test_time_stops_it(stops: Stops, tmp_path: Path) -> None:
    work = Counting()
    work_on(work, tmp_path, stops, TimeLimit(0.0))
    stops.end()
    assert work.saved == [0]


def test_only_work_takes_of_the_time() -> None:
    """Not the measuring between writing and training."""
    now = [100.0]
    limit = TimeLimit(1.0, clock=lambda: now[0])
    with limit.running() as until:
        assert until == 160.0
        now[0] = 140.0
    now[0] = 1000.0
    with limit.running() as until:
        assert until == 1020.0
    with TimeLimit().running() as until:
        assert until == math.inf


def test_a_draft_without_a_step_is_not_measured_again(capsys: pytest.CaptureFixture[str]) -> None:
    untouched: Any = SimpleNamespace(done=0)  # without `measure`
    tell_gain(untouched)
    assert capsys.readouterr().err == "specdec: there was no time to train: the draft is as before\n"


def test_what_is_done_seldom_takes_a_small_part_of_the_time() -> None:
    """The call takes 30 of every 630 seconds."""
    now, done = [0.0], list[float]()

    def slow() -> None:
        done.append(now[0])
        now[0] += 30.0

    look = Seldom(LOOK_SECONDS, slow, clock=lambda: now[0])
    while now[0] < 2000:
        look()
        now[0] += 1.0
    assert done == [60.0, 690.0, 1320.0, 1950.0]
