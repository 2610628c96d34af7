"""Exploration corrects wrong initial measurements: steps converge on the candidates that pay. On a virtual clock."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.decoding.speculation import CandidateSource
from specdec.decoding.tree import BestNodes, Node
from tests.examples import examples
from tests.replay.clock import Clock
from tests.replay.engines import TimedEngine
from tests.verifier_service.fakes import Client, ThreadedTextEngine, step_loop
from verifier_service.backend.request import Policy
from verifier_service.costs.step_latency import MEASURED_ROWS, StepLatency
from verifier_service.costs.token_budget import WindowCosts, select_candidates
from verifier_service.settings.tuning import DEFAULTS

STEP = 0.005
"""Seconds of a step over one row."""

TUNING = DEFAULTS.latency

ROW_COSTS = (0.0, 0.05, 0.3, 1.0)
"""Cost of an additional row, relative to a step over one row."""

PROBABILITIES = (0.5, 0.9)
"""Acceptance probability of each candidate of a chain, given its parent."""

WRONG: dict[str, Callable[[int], float]] = {
    "dear beyond one row": lambda rows: 4.0 if rows > 1 else 1.0,
    "dear at two rows": lambda rows: 4.0 if rows == 2 else 1.0,
    "far too dear": lambda rows: 8.0 if rows > 1 else 1.0,
    "all of it": lambda rows: 4.0,
    "cheap at eight rows": lambda rows: 0.25 if rows == 8 else 1.0,
    "cheap beyond one row": lambda rows: 0.25 if rows > 1 else 1.0,
    "right": lambda rows: 1.0,
}


class Machine:
    """Simulated steps of a session whose candidates form a chain; T(n) = STEP * (1 + row_cost * (n - 1))."""

    def __init__(self, row_cost: float, probability: float, latency: StepLatency) -> None:
        self.latency = latency
        self.exploring = 0.0  # seconds of exploring steps beyond their worth
        self.clock = 0.0
        self._row_cost = row_cost
        self._chain = [probability**depth for depth in range(1, 64) if probability**depth >= 0.02]

    def seconds(self, rows: int) -> float:
        return STEP * (1.0 + self._row_cost * (rows - 1))

    def run(self, until: float, delay: Callable[[], float] = lambda: 1.0) -> float:
        """Make steps; return the final choice's goodput as a fraction of the optimum."""
        while self.clock < until:
            nodes, price, _, exploring = select_candidates([self._offers()], self.latency, 1, 64, explore=True)
            rows = 1 + len(nodes[0])
            if exploring is None:  # candidates left out are below the returned break-even probability
                assert all(probability < price.break_even for probability in self._chain[len(nodes[0]) :])
            taken = self.seconds(rows) * delay()
            if exploring is not None:
                self.latency.explore(exploring)
                self.exploring += max(0.0, self.seconds(rows) - exploring)
            self.latency.observe(rows, taken)
            self.clock += taken
        chosen = 1 + len(select_candidates([self._offers()], self.latency, 1, 64).nodes[0])
        return self._goodput(chosen) / max(map(self._goodput, range(1, len(self._chain) + 2)))

    def _offers(self) -> BestNodes:
        return BestNodes.of(((math.log(chance), Node(0, 0, None, 0.0, 0)) for chance in self._chain), len(self._chain))

    def _goodput(self, rows: int) -> float:
        return (1.0 + sum(self._chain[: rows - 1])) / self.seconds(rows)


def measured(row_cost: float, factor: Callable[[int], float]) -> StepLatency:
    """Return a latency model in which each point is wrong by a factor."""
    return StepLatency(MEASURED_ROWS, [STEP * (1.0 + row_cost * (n - 1)) * factor(n) for n in MEASURED_ROWS])


@pytest.mark.parametrize("probability", PROBABILITIES)
@pytest.mark.parametrize("row_cost", ROW_COSTS)
@pytest.mark.parametrize("wrong", WRONG)
def test_after_a_second_the_choice_is_as_good_as_if_the_cost_were_known(
    wrong: str, row_cost: float, probability: float
) -> None:
    machine = Machine(row_cost, probability, measured(row_cost, WRONG[wrong]))
    assert machine.run(1.0) > 0.8
    assert machine.run(4.0) > 0.95


@settings(max_examples=examples(10))
@given(
    st.lists(st.floats(0.25, 4.0), min_size=len(MEASURED_ROWS), max_size=len(MEASURED_ROWS)),
    st.sampled_from(ROW_COSTS),
    st.sampled_from(PROBABILITIES),
)
def test_no_start_decides_for_good(factors: list[float], row_cost: float, probability: float) -> None:
    machine = Machine(
        row_cost, probability, measured(row_cost, dict(zip(MEASURED_ROWS, factors, strict=True)).__getitem__)
    )
    assert machine.run(1.0) > 0.6
    assert machine.run(5.0) > 0.75


@pytest.mark.parametrize("wrong", WRONG)
def test_steps_that_others_delay_decide_nothing(wrong: str) -> None:
    """One step in five takes two to ten times as long; goodput stays above 85 % of the optimum, averaged over five
    machines."""
    shares = []
    for seed in range(5):
        random = Random(seed)

        def delay(random: Random = random) -> float:
            return random.choice([2.0, 5.0, 10.0]) if random.random() < 0.2 else random.lognormvariate(0.0, 0.1)

        shares.append(Machine(0.05, 0.8, measured(0.05, WRONG[wrong])).run(4.0, delay))
    assert sum(shares) / len(shares) > 0.85


@pytest.mark.parametrize("row_cost", ROW_COSTS)
def test_exploring_costs_a_small_part_of_the_time(row_cost: float) -> None:
    """At most 2 % of the time, plus an initial allowance."""
    machine = Machine(row_cost, 0.8, measured(row_cost, WRONG["dear beyond one row"]))
    machine.run(10.0)
    before = machine.exploring
    assert before < TUNING.first_exploration_seconds + 0.02 * 10.0
    machine.run(20.0)
    assert machine.exploring - before < 0.02 * 10.0


def test_a_slow_spell_is_forgotten_within_a_second() -> None:
    machine = Machine(0.01, 0.8, measured(0.01, WRONG["right"]))
    machine.run(2.0)
    machine.run(2.5, lambda: 20.0)
    assert machine.run(3.5) > 0.95
    assert machine.latency.of(8) == pytest.approx(machine.seconds(8), rel=0.15)


def test_two_steps_in_a_row_do_not_explore() -> None:
    latency = measured(1.0, lambda rows: 1.0)
    latency.observe(1, STEP)
    assert latency.may_explore
    latency.explore(STEP)
    latency.observe(2, 2 * STEP)
    assert not latency.may_explore
    latency.observe(1, STEP)
    assert latency.may_explore


def test_a_window_is_tried_where_it_is_not_certain_that_it_costs_too_much() -> None:
    """This ends when its cost is known, or when the exploration budget is spent."""
    smallest = DEFAULTS.windows.sizes[0]
    latency = measured(0.0, WRONG["dear beyond one row"])
    latency.observe(1, STEP)
    costs = WindowCosts(1.0, latency, 1)
    assert costs.optimistic(smallest) < 0.5 < costs.of(smallest)
    costs.explore()
    latency.observe(1 + smallest.rows, 100 * STEP)
    assert not latency.may_explore
    dear = measured(1.0, WRONG["right"])
    for rows in (1, *[1 + smallest.rows, 1] * 15):
        dear.observe(rows, STEP * rows)
    assert WindowCosts(1.0, dear, 1).optimistic(smallest) > 0.5


def test_a_step_loop_learns_what_a_window_costs_by_opening_one() -> None:
    """By the wrong estimate alone, the window would never open."""
    clock = Clock()
    with clock.rules():
        inner = ThreadedTextEngine(64)
        inner.threads, inner.bad = (1,), -1
        engine = TimedEngine(inner, clock, STEP, 0.0)
        loop = step_loop(engine, measured(0.0, WRONG["far too dear"]))  # type: ignore[arg-type]
        policy = Policy(frozenset({CandidateSource.LOOKAHEAD}), 64, 0.0)
        client = Client(loop, [3, 4, 5], 1000, policy=policy)
        opened = False
        while not client.over and not opened:
            client.read()
            loop.turn()
            opened = client.session.ngrams.window is not None
        assert opened


def test_a_window_that_does_not_fit_in_the_text_is_no_experiment() -> None:
    clock = Clock()
    with clock.rules():
        inner = ThreadedTextEngine(64)
        inner.threads, inner.bad = (1,), -1
        latency = measured(0.0, WRONG["far too dear"])
        loop = step_loop(TimedEngine(inner, clock, STEP, 0.0), latency)  # type: ignore[arg-type]
        client = Client(loop, [3, 4, 5], 3, policy=Policy(frozenset({CandidateSource.LOOKAHEAD}), 64, 0.0))
        loop.turn()  # the prompt
        while not client.over:
            client.read()
            loop.turn()
            assert latency.may_explore


@pytest.mark.parametrize(
    "wrong",
    [
        "far too dear",
        "cheap beyond one row",
        pytest.param("dear beyond one row", marks=pytest.mark.verify),
        pytest.param("dear at two rows", marks=pytest.mark.verify),
        pytest.param("all of it", marks=pytest.mark.verify),
        pytest.param("cheap at eight rows", marks=pytest.mark.verify),
    ],
)
@pytest.mark.parametrize(("row_cost", "least", "most"), [(0.001, 8.0, 9.0), (2.0, 1.0, 1.3)], ids=["free", "dear"])
def test_a_verifier_speculates_within_a_second_if_and_only_if_that_pays(
    wrong: str, row_cost: float, least: float, most: float
) -> None:
    """A whole step loop, whose session always has eight correct candidates."""
    clock = Clock()
    with clock.rules():
        inner = ThreadedTextEngine(64)
        inner.threads, inner.bad = (1,), -1
        engine = TimedEngine(inner, clock, STEP * (1.0 - row_cost), STEP * row_cost)
        loop = step_loop(engine, measured(row_cost, WRONG[wrong]))  # type: ignore[arg-type]
        client = Client(loop, [3, 4, 5], 3500)

        def steps(seconds: float) -> float:
            """Make steps for `seconds`; return the mean tokens per step."""
            begin, had, count = clock.now, client.session.generated, engine.passes
            while clock.now < begin + seconds:
                assert not client.over
                client.read()
                client.offer(right=8)
                loop.turn()
            return (client.session.generated - had) / (engine.passes - count)

        steps(1.0)
        assert least <= steps(0.5) <= most
        client.cancel()
