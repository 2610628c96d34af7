"""A CPU engine uses all threads while no draft is active, and fewer beside a draft or another process that competes for
the cores. Step latency is measured for each thread count."""

from __future__ import annotations

import pytest

from specdec.decoding.speculation import NO_DRAFTERS, CandidateSource
from specdec.engine.kv.blocks import BLOCK
from tests.verifier_service.fakes import Client, Decided, TextEngine, ThreadedTextEngine, step_loop
from verifier_service.backend.request import Policy
from verifier_service.backend.result import Mode
from verifier_service.costs.step_latency import StepLatency
from verifier_service.scheduling.cpu_threads import (
    AdaptiveThreads,
    thread_policy,
)
from verifier_service.settings.tuning import DEFAULTS

REMOTE = frozenset({CandidateSource.REMOTE})

BLOCKS = 40


def test_steps_are_measured_with_each_number() -> None:
    engine = ThreadedTextEngine(BLOCKS)
    cores = AdaptiveThreads(engine, lambda: StepLatency.measure(engine, BLOCKS * BLOCK))
    assert engine.used == 2
    assert cores.latency is cores.plain_latency
    cores.choose(drafting=True, now=0.0)
    assert engine.used == 1
    assert cores.latency is not cores.plain_latency
    cores.choose(drafting=False, now=0.9 * DEFAULTS.threads.linger_seconds)
    assert engine.used == 1  # the message may not have reached the drafts yet
    cores.choose(drafting=False, now=DEFAULTS.threads.linger_seconds)
    assert engine.used == 2
    assert cores.latency is cores.plain_latency


def test_an_engine_whose_threads_cannot_be_changed_is_only_measured() -> None:
    """An adjustable engine beside it is left alone too: the two take turns on one device."""
    beside = ThreadedTextEngine(BLOCKS)
    measured: list[StepLatency] = []

    def measure() -> StepLatency:
        measured.append(StepLatency((1, 2), [0.003, 0.004]))
        return measured[-1]

    cores = thread_policy(TextEngine(BLOCKS), measure, [beside])
    for drafting in (True, False):
        cores.choose(drafting, now=1.0)
        cores.observe(1, 0.006)
        assert not cores.yielding
    assert not cores.yields
    assert [cores.latency] == [cores.plain_latency] == measured
    assert cores.latency.of(1) > 0.003
    assert beside.used == 2


def test_engines_beside_get_the_same_number() -> None:
    engine, beside = ThreadedTextEngine(BLOCKS), ThreadedTextEngine(BLOCKS)
    latency = StepLatency((1, 2), [0.003, 0.004])
    thread_policy(engine, lambda: latency, [beside, TextEngine(BLOCKS)]).choose(drafting=True, now=0.0)
    assert engine.used == beside.used == 1


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("always", [True, False])
def test_room_is_left_where_candidates_of_drafts_are_taken(mode: Mode, speculate: bool, always: bool) -> None:
    engine = ThreadedTextEngine(BLOCKS)
    loop = step_loop(engine, controller=Decided(mode))
    Client(loop, [3, 4, 5], policy=Policy(REMOTE if speculate else NO_DRAFTERS, 8, 0.0, forced=always))
    for _ in range(2):  # prompt, then first token
        loop.turn()
    assert engine.used == (1 if speculate and (always or mode is Mode.REMOTE_DRAFT) else 2)


class Machine:
    """Simulated steps that take `seconds` by thread count, initially without interference."""

    def __init__(self, of_two: float = 0.003, of_one: float = 0.005) -> None:
        self.engine = ThreadedTextEngine(BLOCKS)
        self.seconds = {2: of_two, 1: of_one}
        self.cores = AdaptiveThreads(self.engine, lambda: StepLatency((1, 2), [self.seconds[self.engine.used]] * 2))
        self.clock = 0.0

    def steps(self, seconds: float) -> dict[int, float]:
        """Make steps for `seconds`; return the time spent with each thread count."""
        spent = {1: 0.0, 2: 0.0}
        until = self.clock + seconds
        while self.clock < until:
            taken = self.seconds[self.engine.used]
            spent[self.engine.used] += taken
            self.clock += taken
            self.cores.observe(1, taken)
            self.cores.choose(drafting=False, now=self.clock)
        return spent


def test_a_stranger_takes_one_thread_s_core_not_all_of_the_time() -> None:
    machine = Machine()
    assert machine.steps(5.0)[1] == 0
    machine.seconds = {2: 0.1, 1: 0.006}
    spent = machine.steps(60.0)
    assert spent[2] < 0.1 * 60  # a few steps to notice, a few in every probe
    machine.seconds = {2: 0.003, 1: 0.005}
    machine.steps(DEFAULTS.threads.longest_probe_pause + DEFAULTS.threads.first_probe_pause)
    assert machine.steps(5.0)[1] == 0


def test_a_slower_machine_is_no_stranger() -> None:
    machine = Machine()
    machine.seconds = {2: 0.012, 1: 0.02}  # as with longer texts, or in a slow spell
    spent = machine.steps(10.0)
    assert spent[1] < 0.05 * 10  # only until one thread turns out to be slower too


def test_a_model_that_gains_nothing_by_threads_has_one() -> None:
    machine = Machine(of_two=0.005, of_one=0.003)
    machine.steps(60.0)
    assert machine.steps(120.0)[1] > 0.97 * 120.0


def test_drafts_that_share_the_cores_say_nothing_of_all_threads() -> None:
    machine = Machine()
    machine.cores.choose(drafting=True, now=0.0)
    for _ in range(1000):
        machine.cores.observe(1, 0.0001)
    assert machine.cores.yielding
    machine.cores.choose(drafting=False, now=1.0)
    assert machine.engine.used == 2


def test_a_draft_that_reads_now_and_then_is_no_stranger() -> None:
    """One step in thirty takes eight times as long; on average, all threads are still faster than one."""
    machine = Machine()
    for number in range(3000):
        taken = 0.024 if number % 30 == 0 else machine.seconds[machine.engine.used]
        machine.cores.observe(1, taken)
        machine.cores.choose(drafting=False, now=1.0)
        assert machine.engine.used == 2
