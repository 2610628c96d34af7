"""Start-up logs its phases, and records the time of each."""

from __future__ import annotations

import pytest

from specdec.engine import start_phases
from specdec.engine.start_phases import phase
from tests.captured_logs import captured_logs


def test_a_phase_is_logged_as_it_begins() -> None:
    with captured_logs() as logs, phase("weights"):
        assert [(each["event"], each["phase"]) for each in logs] == [("starting", "weights")]


def test_phases_of_one_name_add_up() -> None:
    for _ in range(2):
        with phase("twice"):
            pass
    assert list(start_phases.seconds()).count("twice") == 1


def test_one_that_fails_is_timed_too() -> None:
    with pytest.raises(ValueError, match="broken"), phase("broken"):
        raise ValueError("broken")
    assert start_phases.seconds()["broken"] >= 0
