"""Grammars work while an asynchronous engine computes: this time is no part of what rows cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import pytest

from specdec.decoding.query import SamplingQuery
from specdec.decoding.step_logits import StepLogits
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Pass
from tests.replay.clock import Clock
from tests.verifier_service.fakes import Client, Decided, DevicePass, DeviceTextEngine, step_loop
from tests.verifier_service.step_loop.helpers import SlowGrammar, client, turns
from verifier_service.backend.result import Mode
from verifier_service.costs.step_latency import StepLatency
from verifier_service.step_loop import StepLoop

PASS = 0.02
"""Seconds of a forward pass."""


@dataclass(kw_only=True)
class ConcurrentPass(DevicePass):
    """A pass that takes PASS seconds from its launch, whatever the host does meanwhile."""

    clock: Clock
    end: float

    def logits(self, asked: Callable[[], Mapping[int, SamplingQuery]]) -> StepLogits:
        logits = super().logits(asked)
        self.clock.now = max(self.clock.now, self.end)
        return logits


class ConcurrentEngine(DeviceTextEngine):
    def __init__(self, clock: Clock) -> None:
        super().__init__(30)
        self._clock = clock

    def launch(self, batch: PackedBatch) -> Pass:
        return ConcurrentPass(self.forward(batch), clock=self._clock, end=self._clock.now + PASS)


class SlowCommit(SlowGrammar):
    """A grammar of everything whose commits take the time."""

    def allowed(self, path: Sequence[int]) -> None:
        return None

    def commit(self, tokens: Sequence[int]) -> None:
        self._clock.now += self._seconds


def after_a_text_with(grammar: type[SlowGrammar], passes: float) -> tuple[StepLoop, StepLatency, Client]:
    """Return loop, latency and client after 50 turns of a text whose grammar takes the time of `passes`."""
    clock, latency = Clock(), StepLatency((1, 2, 4, 8), [PASS] * 4)
    with clock.rules():
        loop = step_loop(ConcurrentEngine(clock), latency=latency, controller=Decided(Mode.OFF))
        one = client(loop, 5, 1, 60)
        one.session.grammar = grammar(clock, passes * PASS)  # type: ignore[assignment]
        turns(loop, 50)
    return loop, latency, one


@pytest.mark.parametrize("commit", [0.1, 0.5, 0.9])
def test_a_commit_after_the_pass_is_not_subtracted_from_it(commit: float) -> None:
    _, latency, _ = after_a_text_with(SlowCommit, commit)
    assert latency.of(1) == pytest.approx(PASS, rel=0.05)


@pytest.mark.parametrize("mask", [0.0, 0.5, 0.9, 1.5, 3.0])
def test_a_grammar_costs_what_the_device_does_not_hide(mask: float) -> None:
    """`mask`: time of a mask in passes."""
    loop, latency, one = after_a_text_with(SlowGrammar, mask)
    assert latency.of(1) == pytest.approx(PASS, rel=0.05)
    assert one.running.beside == pytest.approx(max(0.0, mask - 1) * PASS, abs=0.05 * PASS)
    assert loop.stats.step_expected == pytest.approx(max(1.0, mask) * PASS, rel=0.05)
