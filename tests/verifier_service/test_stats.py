"""The verifier's pace statistics, from which completion times are estimated."""

from __future__ import annotations

import pytest

from verifier_service.backend.result import VerifyResult
from verifier_service.backend.stats import VerifierStats


def test_the_pace_counts_all_that_texts_wait_for() -> None:
    """Steps that they sit out and the time before a step count; prompts do not, while no text waits for them."""
    stats = VerifierStats()
    one, three = [VerifyResult(9, 0, [5])], [VerifyResult(9, 2, [5, 6, 7])]
    stats.observe_pace(0.4, [], sat_out=False)
    stats.observe_pace(0.04, one, sat_out=False)
    assert stats.interval == 0.04
    stats = VerifierStats()
    stats.observe_pace(0.4, one, sat_out=True)
    assert stats.interval == 0.0
    stats.observe_pace(0.05, three, sat_out=False)
    assert stats.interval == pytest.approx(0.15)
