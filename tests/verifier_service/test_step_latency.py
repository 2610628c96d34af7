"""T_v(n) is monotonic, interpolates the measurements, and learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.verifier_service.fakes import TextEngine
from verifier_service.costs.step_latency import (
    ENOUGH,
    MEASURED_ROWS,
    MIN_ROUNDS,
    REPEATS,
    WARM_UP_KEYS,
    StepLatency,
    best_prefill_rows,
    least_seconds,
)

ROWS = (1, 2, 4, 8, 16)
seconds = st.lists(st.floats(1e-4, 1.0), min_size=len(ROWS), max_size=len(ROWS))
counts = st.integers(0, 64)


@given(seconds, counts, counts)
def test_more_rows_never_cost_less(measured: list[float], one: int, other: int) -> None:
    latency = StepLatency(ROWS, measured)
    assert latency.of(min(one, other)) <= latency.of(max(one, other)) * (1 + 1e-12)


@given(seconds, st.lists(st.tuples(st.integers(1, ROWS[-1]), st.floats(1e-4, 1.0)), max_size=20))
def test_no_row_is_cheaper_than_none_by_rounding(measured: list[float], steps: list[tuple[int, float]]) -> None:
    """A break-even probability below 0 would be an invalid commit."""
    latency = StepLatency(ROWS, measured)
    for rows, taken in steps:
        latency.observe(rows, taken)
    table = [latency.of(rows) for rows in range(ROWS[-1] + 3)]
    assert table == sorted(table)


@given(seconds)
def test_it_goes_through_what_was_measured(measured: list[float]) -> None:
    latency = StepLatency(ROWS, sorted(measured))
    assert [latency.of(rows) for rows in ROWS] == sorted(measured)


def test_between_and_beyond() -> None:
    latency = StepLatency((1, 2, 4), [1.0, 2.0, 3.0])
    assert latency.of(3) == 2.5
    assert latency.of(6) == pytest.approx(4.0)
    assert latency.of(0) == 1.0
    cannot_be = StepLatency((1, 2, 4), [1.0, 3.0, 2.0])
    assert 2.0 < cannot_be.of(2) < 3.0
    assert cannot_be.of(4) == pytest.approx(cannot_be.of(2))


@given(seconds, st.floats(1e-5, 3.0))
def test_rows_within_is_the_inverse(measured: list[float], time: float) -> None:
    latency = StepLatency(ROWS, measured)
    rows = latency.rows_within(time)
    assert rows == 0 or latency.of(rows) <= time * (1 + 1e-9)
    assert rows == 1 << 20 or latency.of(rows + 1) > time


@given(seconds, st.lists(st.tuples(st.integers(1, 40), st.floats(1e-4, 3.0)), max_size=5), st.integers(1, 40))
def test_as_many_rows_as_took_a_time_fit_into_it(
    measured: list[float], steps: list[tuple[int, float]], rows: int
) -> None:
    """Even if the speed, which every step changes, causes rounding in the product and the quotient."""
    latency = StepLatency(ROWS, sorted(measured))
    for count, taken in steps:
        latency.observe(count, taken)
    assert latency.rows_within(latency.of(rows)) >= rows


@given(seconds, st.integers(1, ROWS[-1]), st.floats(0.01, 100.0))
def test_one_observation_moves_towards_itself(measured: list[float], rows: int, factor: float) -> None:
    """The estimate moves a part of the way."""
    assume(not 0.99 < factor < 1.01)
    measured.sort()
    latency, before = StepLatency(ROWS, list(measured)), StepLatency(ROWS, list(measured))
    time = before.of(rows) * factor
    latency.observe(rows, time)
    if factor > 1:
        assert before.of(rows) < latency.of(rows) < time
    else:
        assert time < latency.of(rows) <= before.of(rows)


@given(st.floats(1.0, 10.0), st.integers(2, ROWS[-1]))
def test_a_slow_spell_is_put_down_to_the_machine(factor: float, rows: int) -> None:
    """Steps have many rows during the slow spell and one row after it: at most about half of the slowdown is attributed
    to rows (50.7 % with 8 rows and a factor of 1.25)."""
    latency = StepLatency(ROWS, [1e-3 * (1.0 + 0.02 * n) for n in ROWS])
    for n in ROWS * 10:  # the verifier has been running for a while
        latency.observe(n, 1e-3 * (1.0 + 0.02 * n))
    before = latency.of(rows) / latency.of(1)
    for _ in range(100):
        latency.observe(rows, 1e-3 * factor * (1.0 + 0.02 * rows))
    for _ in range(100):
        latency.observe(1, 1.02e-3)
    assert abs(math.log(latency.of(rows) / latency.of(1) / before)) <= 0.55 * math.log(factor) + 1e-3
    assert latency.of(1) == pytest.approx(1.02e-3, rel=0.03)


@pytest.mark.parametrize(
    "measured", [[1.0] * 5, [1e-4] * 5, [1e-4, 1e-4, 1e-4, 1e-4, 1.0], [0.1, 0.05, 0.3, 0.01, 0.4]]
)
@pytest.mark.parametrize(("step", "row"), [(0.01, 0.0), (0.01, 0.001), (0.0, 0.1)])
def test_many_observations_convince(measured: list[float], step: float, row: float) -> None:
    """From any initial measurement; the true step time is linear."""
    latency = StepLatency(ROWS, measured)
    for rows in Random(0).choices(range(1, ROWS[-1] + 1), k=12_000):
        latency.observe(rows, step + row * rows)
    assert [latency.of(rows) for rows in ROWS] == pytest.approx([step + row * rows for rows in ROWS], rel=0.02)


def test_what_is_off_the_scale_teaches_nothing() -> None:
    latency = StepLatency((1, 2, 4), [1.0, 2.0, 3.0])
    latency.observe(5, 1000.0)
    assert [latency.of(rows) for rows in (1, 2, 4, 5)] == [1.0, 2.0, 3.0, 3.5]


@pytest.mark.parametrize("blocks", [2, 3, 100])
def test_it_is_measured_within_the_memory(blocks: int) -> None:
    engine = TextEngine(blocks, tree_slots=0)
    latency = StepLatency.measure(engine, blocks * 64, enough=math.inf)
    sizes = [n for n in MEASURED_ROWS if n + WARM_UP_KEYS < blocks * 64]
    assert engine.steps == [*sizes] * REPEATS
    assert len(sizes) >= 2  # otherwise there would be no slope
    assert 0 < latency.of(1) <= latency.of(64) < math.inf


def test_where_steps_are_long_fewer_are_measured() -> None:
    engine = TextEngine(100, tree_slots=0)
    StepLatency.measure(engine, 100 * 64, enough=0.0)
    assert engine.steps == [*MEASURED_ROWS] * MIN_ROUNDS


def of_a_model(row: float, least: float) -> tuple[list[int], Callable[[int], float]]:
    """Return a list of all steps' row counts, and a function that makes a step of `row` seconds per row, at least
    `least`."""
    made: list[int] = []

    def seconds(rows: int) -> float:
        made.append(rows)
        return max(least, row * rows)

    return made, seconds


@pytest.mark.parametrize(
    ("row", "least", "longest", "rounds"),
    [
        (1e-5, 1e-3, 256, REPEATS),
        (0.006, 0.06, 64, MIN_ROUNDS),  # 64 rows take 0.38 s
        (0.03, 0.24, 16, MIN_ROUNDS),  # long, but the cost of a row is not known yet
        (0.2, 1.6, 16, 1),  # a single round: its steps are too long to repeat
    ],
)
def test_what_takes_long_is_extended_along_a_line(row: float, least: float, longest: int, rounds: int) -> None:
    made, seconds = of_a_model(row, least)
    found = least_seconds(MEASURED_ROWS, seconds, ENOUGH)
    assert made == [rows for rows in MEASURED_ROWS if rows <= longest] * rounds
    assert found == pytest.approx([max(least, row * rows) for rows in MEASURED_ROWS])


@pytest.mark.parametrize("delayed", [1, 16, 128])
def test_a_step_for_which_kernels_were_made_is_repeated(delayed: int) -> None:
    made: list[int] = []

    def seconds(rows: int) -> float:
        made.append(rows)
        return 3.0 if rows == delayed and made.count(rows) == 1 else 1e-3 * rows

    found = least_seconds(MEASURED_ROWS, seconds, ENOUGH)
    assert found == pytest.approx([1e-3 * rows for rows in MEASURED_ROWS])


def test_a_measurement_that_falls_is_extended_flat() -> None:
    taken = {1: 0.5, 2: 0.5, 4: 0.5, 8: 0.9, 16: 0.6}
    assert least_seconds(MEASURED_ROWS, taken.__getitem__, ENOUGH)[5:] == [0.6] * 4


def test_prompts_are_measured_where_there_is_memory_for_them() -> None:
    engine = TextEngine(10)
    assert best_prefill_rows(engine, 10 * 64, 512) in (128, 256, 512)
    assert set(engine.steps) <= {128, 256, 512}
    assert len(engine.steps) <= 9
    engine.steps.clear()
    assert best_prefill_rows(engine, 512, 512) == 512
    assert engine.steps == []
