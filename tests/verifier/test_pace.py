"""Waiting for candidates: only while it pays, and never past patience."""

from __future__ import annotations

from verifier_service.pace import Pace

STEP = 0.010


def wait(
    pace: Pace, base: int, now: float, *, expected: float = 1.0, leaf: float = 1.0, patience: float = 1.0
) -> float | None:
    return pace.wait_until(base, now, expected=expected, leaf=leaf, step_time=STEP, patience=patience)


def learned(delay: float, gap: float = 0.001) -> Pace:
    """A pace that knows a draft which answers after `delay` and goes on every `gap`."""
    pace = Pace()
    for base in range(100):
        pace.committed(base, float(base))
        pace.arrived(base, base + delay)
        pace.arrived(base, base + delay + gap)
    pace.committed(100, 100.0)
    return pace


def test_it_waits_for_a_quick_draft_with_nothing_in_hand() -> None:
    until = wait(learned(0.002), 100, 100.0)
    assert until is not None
    assert 100.002 < until <= 100.005


def test_it_goes_on_waiting_while_messages_add_enough() -> None:
    pace = learned(0.002, gap=0.001)
    pace.arrived(100, 100.002)
    assert wait(pace, 100, 100.002, expected=1.7, leaf=0.7) is not None
    assert wait(pace, 100, 100.002, expected=3.0, leaf=0.05) is None


def test_it_does_not_wait_when_the_step_is_full() -> None:
    assert wait(learned(0.002), 100, 100.0, expected=3.0, leaf=0.0) is None


def test_a_slow_draft_is_not_waited_for() -> None:
    assert wait(learned(0.050), 100, 100.0) is None


def test_a_draft_that_is_always_wrong_is_not_waited_for() -> None:
    pace = learned(0.002)
    for _ in range(100):
        pace.walked(0, corrected=True)
    assert wait(pace, 100, 100.0) is None


def test_patience_is_the_longest_wait() -> None:
    until = wait(learned(0.004), 100, 100.0, patience=0.003)
    assert until == 100.003
    assert wait(learned(0.004), 100, 100.004, patience=0.003) is None


def test_a_wait_in_vain_teaches_at_once() -> None:
    pace = learned(0.002)
    pace.gave_up(100, 100.5)
    pace.committed(101, 101.0)
    assert wait(pace, 101, 101.0) is None


def test_late_messages_teach_that_a_draft_is_quick_again() -> None:
    pace = learned(0.050)
    for base in range(101, 140):  # the verifier steps on without waiting; answers come to what is past
        pace.committed(base, float(base))
        pace.committed(base + 1000, base + 0.001)
        pace.arrived(base, base + 0.002)
    pace.committed(200, 200.0)
    assert wait(pace, 200, 200.0) is not None


def test_it_remembers_only_recent_commits() -> None:
    pace = learned(0.002)
    pace.arrived(5, 200.0)  # long past: nothing to learn
    assert wait(pace, 100, 100.0) is not None
