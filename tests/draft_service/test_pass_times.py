"""Pass times: the expansion width, a fitted line, and the nodes that are worth their part of a pass."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draft_service.pass_times import (
    MAX_OBSERVED,
    ROWS,
    WIDTHS,
    PassTimes,
    measured_width,
    widest_of_all,
    widest_of_session,
)
from specdec.engine.batch import PackedBatch
from tests.draft_service.fakes import Engine

seconds = st.floats(1e-5, 1.0)
sizes = st.integers(1, 300)


@pytest.mark.parametrize(("a_row", "width"), [(0.0, 16), (0.02, 16), (0.03, 8), (0.06, 8), (0.07, 4), (1.0, 4)])
def test_a_session_gets_as_many_as_cost_hardly_more_than_four(a_row: float, width: int) -> None:
    """Each row beyond four lengthens a step by a constant fraction; all together may lengthen it by a quarter."""
    assert widest_of_session(lambda rows: 1.0 + a_row * (rows - 4)) == width


@pytest.mark.parametrize(
    ("a_row", "room", "rows"),
    [(0.0, 1000, 256), (0.0, 100, 64), (0.0, 10, 16), (0.015, 1000, 64), (0.03, 1000, 32), (0.04, 1000, 16)],
)
def test_all_sessions_get_as_many_as_take_twice_as_long_as_four(a_row: float, room: int, rows: int) -> None:
    tried = []

    def seconds(count: int) -> float:
        tried.append(count)
        return 1.0 + a_row * (count - 4)

    assert widest_of_all(seconds, 1.0, room) == rows
    assert tried == [count for count in ROWS[1:] if count <= min(room, 2 * rows)]  # stops at the first one too long


def test_the_width_is_measured_before_anybody_has_memory() -> None:
    engine = Engine()
    width = measured_width(engine, 1024, 5)
    assert width.of_session in WIDTHS
    assert width.of_all in ROWS
    assert {len(tokens) for tokens in engine.read} - set(ROWS) <= set(WIDTHS)
    assert set(WIDTHS) <= {len(tokens) for tokens in engine.read}


@pytest.mark.parametrize("context", [2, 30, 256])
def test_no_row_lies_beyond_a_short_context(context: int) -> None:
    class Short(Engine):
        def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
            assert batch.positions.max() < context
            return super().forward(batch)

    assert measured_width(Short(), context, 5).of_session in WIDTHS


@given(seconds, seconds)
def test_a_line_is_found(base: float, a_node: float) -> None:
    times = PassTimes({n: base + n * a_node for n in (4, 8, 16)})
    for nodes in (1, 10, 100):
        assert times.of(nodes) == pytest.approx(base + nodes * a_node, rel=1e-6)


@given(st.dictionaries(sizes, seconds, min_size=2), st.lists(st.tuples(sizes, seconds)))
def test_after_any_passes_more_nodes_take_no_less_and_no_pass_is_free(
    measured: dict[int, float], passes: list[tuple[int, float]]
) -> None:
    times = PassTimes(measured)
    for nodes, took in passes:
        times.observe(nodes, took)
    assert -1e-9 <= times.of(0) <= times.of(1) <= times.of(300)
    assert times.of(300) > 0


def test_passes_teach_it() -> None:
    times = PassTimes({4: 1.0, 8: 1.0})
    for number in range(500):
        nodes = 2 + number % 60
        times.observe(nodes, 0.5 + 0.1 * nodes)
    assert times.of(40) == pytest.approx(4.5, rel=0.05)


def test_a_stalled_pass_counts_as_a_slow_one() -> None:
    stalled, slow = PassTimes({4: 1.0, 8: 2.0}), PassTimes({4: 1.0, 8: 2.0})
    stalled.observe(4, 1000.0)
    slow.observe(4, MAX_OBSERVED)
    assert stalled.of(4) == pytest.approx(slow.of(4))


@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=20), st.floats(0.0, 1.0), seconds, seconds)
def test_a_node_above_break_even_raises_the_rate_of_a_pass(
    probabilities: list[float], probability: float, base: float, a_node: float
) -> None:
    times = PassTimes({n: base + n * a_node for n in (4, 8)})
    without = sum(probabilities) / times.of(len(probabilities))
    with_it = (sum(probabilities) + probability) / times.of(len(probabilities) + 1)
    break_even = times.break_even(probabilities)
    if abs(probability - break_even) > 1e-6 * break_even:
        assert (with_it > without) == (probability > break_even)


@pytest.mark.parametrize("measured", [{}, {4: 1.0}])
def test_a_line_needs_two_points(measured: dict[int, float]) -> None:
    with pytest.raises(ValueError, match=f"measured must have at least 2 node counts, has {len(measured)}"):
        PassTimes(measured)


def test_another_level_at_start_is_no_slope() -> None:
    """Passes take longer than at start-up, for instance with longer texts, and all have about the same size."""
    times = PassTimes({n: 1.4 + 0.02 * n for n in (4, 8, 16)})
    for number in range(200):
        nodes = 7 + number % 3
        times.observe(nodes, 3.0 + 0.02 * nodes)
    assert times.of(8) == pytest.approx(3.16, rel=0.01)
    assert times.of(16) - times.of(8) == pytest.approx(0.16, rel=0.1)
