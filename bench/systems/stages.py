"""Stage times: the processor time of a step loop's or a draft loop's thread, by activity.

Methods are replaced by timed ones, in a process dedicated to the measurement. Time in a nested stage counts only for
the inner one.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.engine.engine import Pass
from verifier_service.scheduling import planner, step_candidates
from verifier_service.scheduling.planner import StepPlan
from verifier_service.step_loop import StepLoop
from verifier_service.verification import verified_step

WRITTEN_EVERY = 0.1
"""Seconds between two writes of the file."""

Seconds = dict[str, float]


class Stages:
    """The stages of one thread. `seconds`: processor time so far, by stage."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0

    def time(self, owner: Any, name: str, stage: str) -> None:
        """Replace this method or function of `owner` by one whose time counts towards the stage."""
        setattr(owner, name, self.timed(getattr(owner, name), stage))

    def timed(self, run: Callable[..., Any], stage: str) -> Callable[..., Any]:
        def timed(*args: Any, **options: Any) -> Any:
            self._switch()
            self._open.append(stage)
            try:
                return run(*args, **options)
            finally:
                self._switch()
                self._open.pop()

        return timed

    def _switch(self) -> None:
        now = time.thread_time()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def write(self, file: Path) -> None:
        """Write the seconds so far to a file, atomically for its readers."""
        beside = file.with_suffix(".new")
        beside.write_text(json.dumps(dict(self.seconds)))
        os.replace(beside, file)

    def keep(self, file: Path) -> None:
        """Write the seconds periodically, from another thread, as long as the process runs."""

        def write() -> None:
            while True:
                self.write(file)
                time.sleep(WRITTEN_EVERY)

        threading.Thread(target=write, name="stages", daemon=True).start()


def of_verifier(loop: StepLoop) -> Stages:
    """Time the stages of a step loop that has not started, and return them. Those with "(beside)" in their name run
    while a device computes."""
    stages, queue, speculation = Stages(), loop._queue, loop._speculation
    for owner, name, stage in (
        (loop, "_receive", "messages"),
        (loop, "step", "rest"),
        (queue, "admit", "who is ready"),
        (loop, "_ready", "who is ready"),
        (queue, "reserve_texts", "who is ready"),
        (speculation, "select", "mode"),
        (speculation, "propose", "propose"),
        (loop, "_seconds_to_wait", "wait?"),
        (loop._planner, "plan", "plan"),
        (planner, "select_candidates", "choose candidates"),
        (step_candidates, "select_candidates", "choose candidates"),
        (loop._planner, "pack_next", "plan the next (beside)"),
        (loop, "_launch", "launch"),
        (verified_step, "verify_trees", "verify"),
        (verified_step.VerifiedStep, "commit", "commit"),
        (loop._publisher, "publish", "publish"),
    ):
        stages.time(owner, name, stage)
    plan, launch = loop._planner.plan, loop._launch

    def packed_in_time(*args: Any, **options: Any) -> StepPlan:
        planned = plan(*args, **options)
        return replace(planned, pack=stages.timed(planned.pack, "pack"))

    loop._planner.plan = packed_in_time  # type: ignore[method-assign]
    loop._launch = lambda batch: StagedPass(launch(batch), stages)
    return stages


@dataclass(frozen=True)
class StagedPass:
    """A launched pass whose logits are timed as stages."""

    inner: Pass
    stages: Stages

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        queries = self.stages.timed(asked, "queries (beside)")
        logits: StepLogits = self.stages.timed(self.inner.logits, "choose tokens")(queries)
        return logits


def of_draft(loop: DraftLoop) -> Stages:
    """Time the stages of a draft loop that has not started, and return them."""
    stages, drafter = Stages(), loop.drafter
    assert isinstance(drafter, LanguageModelDrafter)
    for owner, name, stage in (
        (loop, "_receive", "messages"),
        (loop, "step", "which are next"),
        (drafter, "_plan_nodes", "plan"),
        (drafter, "expand", "pack, children"),
        (loop, "_send", "send"),
    ):
        stages.time(owner, name, stage)
    return stages


def between(before: Seconds, after: Seconds, steps: int) -> Seconds:
    """Return the microseconds per step of each stage between two readings."""
    return {stage: round(1e6 * (after[stage] - before.get(stage, 0.0)) / max(1, steps), 1) for stage in after}
