"""After occasional deaths, restarts go on without limit; consecutive deaths end them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specdec.serving.process.restarts import CALM_SECONDS, DEATHS, FIRST_PAUSE_SECONDS, Restarts


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_pauses_double_until_it_is_given_up() -> None:
    restarts = Restarts(Clock())
    pauses = [restarts.died() for _ in range(DEATHS)]
    assert pauses == [*(FIRST_PAUSE_SECONDS * 2**n for n in range(DEATHS - 1)), None]


@given(st.lists(st.floats(0, CALM_SECONDS - 0.01), min_size=DEATHS - 1, max_size=DEATHS - 1))
def test_a_short_life_does_not_end_the_row(lives: list[float]) -> None:
    clock = Clock()
    restarts = Restarts(clock)
    for life in lives:
        restarts.ready()
        clock.now += life
        assert restarts.died() is not None
    assert restarts.died() is None


@given(st.lists(st.floats(CALM_SECONDS + 0.01, 1e6), max_size=20))
def test_a_calm_life_ends_the_row(lives: list[float]) -> None:
    clock = Clock()
    restarts = Restarts(clock)
    for life in lives:
        restarts.ready()
        clock.now += life
        assert restarts.died() == FIRST_PAUSE_SECONDS


def test_a_long_start_is_no_calm() -> None:
    """A service that takes minutes to load its model and then dies is given up too."""
    clock = Clock()
    restarts = Restarts(clock)
    restarts.ready()
    for _ in range(DEATHS - 1):
        assert restarts.died() is not None
        clock.now += 10 * CALM_SECONDS
    assert restarts.died() is None
