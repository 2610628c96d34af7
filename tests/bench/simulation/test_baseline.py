"""The baseline of `simulate`: synchronous drafting at its best."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.simulation.devices import PRESETS, Device, Hardware
from bench.simulation.scenario import Scenario
from bench.simulation.simulate import main, measured, synchronous

DRAFT = PRESETS["70b"].draft
FLAT, STEEP = Hardware(Device(0.03, 0.0), DRAFT), Hardware(Device(0.001, 0.002), DRAFT)
FOUR = Scenario(FLAT, sessions=4, warm_up=50, measured=40)
ANSWERS = ((4, 0), (8, 0))


@pytest.mark.parametrize(("hardware", "lockstep"), [(FLAT, True), (STEEP, False)])
def test_the_better_of_lockstep_and_taking_turns_counts(hardware: Hardware, lockstep: bool) -> None:
    """If a step's latency does not depend on its rows, all streams should share each step. If every row costs, some
    streams should be verified while the others wait for their drafts. Of the answers, too, the better counts."""
    scenario = replace(FOUR, hardware=hardware)
    best = synchronous(scenario, ANSWERS)
    assert best.synchronous
    assert best.lockstep is lockstep
    variants = [
        replace(best, lockstep=shared, nodes=nodes, branches=branches)
        for shared in (False, True)
        for nodes, branches in ANSWERS
    ]
    assert all(measured(best).rate > measured(other).rate for other in variants if other != best)


@pytest.mark.verify
def test_the_best_answer_counts() -> None:
    assert synchronous(FOUR, ((1, 1), (16, 0))).nodes == 16
    assert synchronous(replace(FOUR, hardware=STEEP), ((1, 1), (16, 0))).nodes == 1


def test_an_acceptance_that_no_language_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--acceptance", "0.99"])
    assert "--acceptance is 0.99, must be from " in capsys.readouterr().err
