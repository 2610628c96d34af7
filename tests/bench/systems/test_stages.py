"""Stage times of a loop's thread."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from bench.systems.stages import Stages, between, of_draft, of_verifier
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from tests.draft_service.fakes import Engine
from tests.verifier_service.fakes import Client, DeviceTextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD
from verifier_service.scheduling import planner, step_candidates
from verifier_service.verification import verified_step
from verifier_service.verification.verified_step import VerifiedStep


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Chores:
    def inner(self) -> str:
        work(0.02)
        return "done"

    def outer(self) -> str:
        work(0.01)
        return self.inner()


def test_what_a_stage_calls_counts_once() -> None:
    stages, chores = Stages(), Chores()
    stages.time(chores, "inner", "inner")
    stages.time(chores, "outer", "outer")
    assert chores.outer() == "done"
    work(0.02)  # outside all stages
    assert 0.01 <= stages.seconds["outer"] < 0.02 <= stages.seconds["inner"] < 0.04
    chores.inner()
    assert stages.seconds["inner"] >= 0.04


def test_a_step_loop_works_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in (
        (planner, "select_candidates"),
        (step_candidates, "select_candidates"),
        (verified_step, "verify_trees"),
        (VerifiedStep, "commit"),
    ):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # restored at the end
    engine = DeviceTextEngine(8)
    loop = step_loop(engine)
    stages = of_verifier(loop)
    client = Client(loop, [5, 6, 7], sampling=NO_BAD)
    run(loop, client)
    assert client.tokens == client.want
    assert engine.faults == []
    assert {"plan", "pack", "queries (beside)", "plan the next (beside)", "verify", "commit", "publish"} <= set(
        stages.seconds
    )
    assert all(seconds >= 0 for seconds in stages.seconds.values())


def test_a_draft_loop_works_as_before() -> None:
    loop = DraftLoop(LanguageModelDrafter(Engine()))
    stages = of_draft(loop)
    assert loop.turn() is None
    assert "which are next" in stages.seconds


def test_they_are_kept_in_a_file(tmp_path: Path) -> None:
    stages, file = Stages(), tmp_path / "verifier.json"
    for seconds in (0.5, 0.75):
        stages.seconds["plan"] = seconds
        stages.write(file)
        assert json.loads(file.read_text()) == {"plan": seconds}
    assert between({"plan": 0.25}, {"plan": 0.5, "pack": 0.1}, 1000) == {"plan": 250.0, "pack": 100.0}
