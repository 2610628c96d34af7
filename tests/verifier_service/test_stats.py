"""The verifier's pace statistics, from which completion times are estimated."""

from __future__ import annotations

import time

import pytest

from verifier_service.backend.result import VerifyResult
from verifier_service.backend.stats import INTERVAL_SMOOTHING, OUTLIER, VerifierStats


def test_the_pace_counts_all_that_texts_wait_for() -> None:
    """Steps that texts sit out and the time before a step count; prompts count only if a text waits for them."""
    stats = VerifierStats()
    one, three = [VerifyResult(9, 0, [5])], [VerifyResult(9, 2, [5, 6, 7])]
    stats.observe_pace(0.4, [], texts_waited=False)
    stats.observe_pace(0.04, one, texts_waited=False)
    assert stats.interval == 0.04
    stats = VerifierStats()
    stats.observe_pace(0.4, one, texts_waited=True)
    assert stats.interval == 0.0
    stats.observe_pace(0.05, three, texts_waited=False)
    assert stats.interval == pytest.approx(0.15)


def test_one_session_of_many_hours_does_not_refuse_the_next_texts() -> None:
    """A stalled reader may hold memory for hours."""
    stats = VerifierStats(running=8, usual_tokens=100, interval=0.02, lifetime=5.0, idle=False)
    stats.finished(257, 6 * 3600.0, 0.1)
    assert stats.expected_wait(1) < 3
    assert stats.too_late(100, time.monotonic() + 30, 1) is None


def test_a_pod_that_stood_still_takes_texts_again() -> None:
    """One step of half a minute hardly changes the pace; ten slow steps do."""
    stats = VerifierStats(running=1, usual_tokens=100)
    one = [VerifyResult(9, 0, [5])]
    stats.observe_pace(0.02, one)
    stats.observe_pace(30.0, one)
    assert stats.interval == pytest.approx(0.02 * (1 + INTERVAL_SMOOTHING * (OUTLIER - 1)))
    assert stats.too_late(100, time.monotonic() + 60, 0) is None
    for _ in range(10):
        stats.observe_pace(1.0, one)
    assert stats.too_late(100, time.monotonic() + 20, 0)
