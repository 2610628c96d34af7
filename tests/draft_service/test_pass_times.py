"""Pass times: a fitted line, and the nodes that are worth their part of a pass."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.pass_times import MAX_SLOWDOWN, PassTimes

seconds = st.floats(1e-5, 1.0)
sizes = st.integers(1, 300)


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
    slow.observe(4, MAX_SLOWDOWN)
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
