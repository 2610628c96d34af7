"""The pace of passes during an evaluation."""

from __future__ import annotations

import pytest

from evaluation.pace import TIMED_ROWS, Pace


def test_the_mean_follows_a_machine_that_becomes_slower() -> None:
    slower = [1.0]
    pace = Pace(lambda rows: slower[0] * 0.02 * rows, lambda rows: 0.01 * rows)
    assert (pace.spread, pace.seconds(4)) == pytest.approx((1.0, 0.08))
    slower[0] = 3.0
    pace.measure()
    assert (pace.spread, pace.seconds(4)) == pytest.approx((3.0, 0.16))


def test_a_single_delay_counts_only_by_its_share() -> None:
    times = iter([0.001] * 40 + [0.009] + [0.001] * 1000)
    pace = Pace(lambda rows: next(times), lambda rows: 0.001)
    pace.measure()
    assert pace.spread < 1.2


def test_slow_passes_are_timed_once_each() -> None:
    timed: list[int] = []

    def run(rows: int) -> float:
        timed.append(rows)
        return 1.0

    Pace(run, lambda rows: 1.0)
    assert timed == list(TIMED_ROWS)
