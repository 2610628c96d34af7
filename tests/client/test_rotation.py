"""The order of addresses, on a fake clock."""

from __future__ import annotations

import pytest

from specdec.client.retries import Rotation


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def turns(rotation: Rotation, count: int) -> list[str]:
    return [rotation.pick({}) for _ in range(count)]


def test_each_in_its_turn(clock: Clock) -> None:
    rotation = Rotation("abc", clock)
    first = turns(rotation, 3)
    assert sorted(first) == ["a", "b", "c"]
    assert turns(rotation, 6) == first * 2


def test_turns_begin_anywhere(clock: Clock) -> None:
    """A false alarm has probability 3 * (2 / 3) ** 100, below 1e-16."""
    assert {Rotation("abc", clock).pick({}) for _ in range(100)} == {"a", "b", "c"}


def test_one_that_failed_rests_and_returns(clock: Clock) -> None:
    rotation = Rotation("ab", clock)
    rotation.failed("a")
    assert turns(rotation, 3) == ["b"] * 3
    clock.now += 1.1
    assert set(turns(rotation, 2)) == {"a", "b"}


def test_rests_grow_until_it_answers(clock: Clock) -> None:
    def rest() -> float:
        rotation.failed("a")
        start = clock.now
        while rotation.pick({}) == rotation.pick({}) == "b":
            clock.now += 0.125
        return clock.now - start

    rotation = Rotation("ab", clock)
    assert [rest() for _ in range(6)] == [1, 2, 4, 8, 10, 10]
    rotation.answered("a")
    assert rest() == 1


def test_calls_that_break_off_together_are_one_failure(clock: Clock) -> None:
    rotation = Rotation("ab", clock)
    for _ in range(250):
        rotation.failed("a")
    clock.now += 1.1
    assert set(turns(rotation, 2)) == {"a", "b"}


def test_where_all_rest_the_one_that_wakes_first_is_asked(clock: Clock) -> None:
    rotation = Rotation("ab", clock)
    rotation.failed("b")
    clock.now += 0.5
    rotation.failed("a")
    assert turns(rotation, 3) == ["b"] * 3


def test_a_call_asks_where_it_failed_least(clock: Clock) -> None:
    rotation = Rotation("abc", clock)
    rotation.failed("b")
    assert rotation.pick({"a": 1, "c": 1}) == "b"  # although b is paused
    assert rotation.pick({"a": 2, "b": 2, "c": 1}) == "c"
