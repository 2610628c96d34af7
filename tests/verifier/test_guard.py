"""The guard finds the better way, keeps to it, and looks again, less and less often."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from verifier_service.guard import EPOCH, FIRST_PAUSE, LONGEST_PAUSE, Guard

STEP = 0.01


@dataclass
class Pod:
    """Steps of a pod on which tokens come at a rate with speculation, and at another without."""

    guard: Guard
    drafted: float
    plain: float
    expected: float | None = None  # of plain decoding; what it brings indeed, if not given
    now: float = 100.0

    def run(self, seconds: float, sessions: int = 4) -> float:
        """For so long; the part of the time in which it speculated."""
        speculating = 0.0
        end = self.now + seconds
        while self.now < end:
            on = self.guard.speculating
            speculating += on
            self.now += STEP
            self.guard.observe(
                self.now,
                sessions=sessions,
                tokens=round((self.drafted if on else self.plain) * STEP),
                seconds=STEP,
                plain_rate=self.plain if self.expected is None else self.expected,
            )
        return speculating * STEP / seconds


def test_speculation_that_pays_is_never_interrupted() -> None:
    assert Pod(Guard(), drafted=3000, plain=1000).run(100) == pytest.approx(1.0, rel=1e-3)


def test_speculation_that_does_not_pay_is_switched_off() -> None:
    pod = Pod(Guard(), drafted=1000, plain=2000)
    pod.run(3 * EPOCH)
    assert not pod.guard.speculating
    assert pod.run(300) < 0.03  # tried again now and then


def test_an_expectation_that_was_too_high_is_found_out() -> None:
    pod = Pod(Guard(), drafted=2000, plain=1000, expected=3000)
    pod.run(5)
    assert pod.run(300) > 0.97


def test_it_comes_back_when_it_pays_again() -> None:
    pod = Pod(Guard(), drafted=1000, plain=2000)
    pod.run(20)
    pod.drafted = 4000
    pod.run(LONGEST_PAUSE)
    assert pod.run(20) > 0.9


def test_a_draw_changes_nothing() -> None:
    pod = Pod(Guard(), drafted=1000, plain=1020)
    pod.run(5)
    assert pod.guard.speculating


def test_each_number_of_sessions_has_its_own() -> None:
    guard = Guard()
    alone, crowd = Pod(guard, drafted=300, plain=100), Pod(guard, drafted=1000, plain=2000)
    crowd.run(5, sessions=40)
    assert not guard.speculating
    assert alone.run(5, sessions=1) > 0.99
    crowd.run(STEP, sessions=40)
    assert not guard.speculating  # it remembers


def test_trials_become_rarer() -> None:
    pod = Pod(Guard(), drafted=1000, plain=2000)
    early = pod.run(4 * FIRST_PAUSE)
    pod.run(300)
    assert pod.run(4 * LONGEST_PAUSE) < early / 3


@pytest.mark.parametrize("stay", [0.02, 0.1])
def test_a_measurement_goes_on_where_it_was_left(stay: float) -> None:
    """Sessions come and go: their number crosses a power of two long before an epoch is over."""
    pod = Pod(Guard(), drafted=1000, plain=2000)
    for _ in range(round(9 * EPOCH / stay)):
        pod.run(stay, sessions=7)
        pod.run(stay, sessions=8)
    for sessions in (7, 8):
        pod.run(STEP, sessions=sessions)
        assert not pod.guard.speculating
