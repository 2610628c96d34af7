"""Circuit breaker: transitions between closed, open and half-open."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest

from specdec.serving.pods.breaker import FAILURES, FIRST_OPEN_SECONDS, MAX_OPEN_SECONDS, TRIAL_SECONDS, Breaker
from tests.captured_logs import captured_logs


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def breaker(clock: Clock) -> Breaker:
    return Breaker(clock=clock)


def state(breaker: Breaker) -> str:
    """Return the state at the current time."""
    return breaker.state


def test_a_few_failures_in_a_row_open_it(breaker: Breaker) -> None:
    for _ in range(FAILURES - 1):
        breaker.failed()
    assert state(breaker) == "closed"
    breaker.failed()
    assert state(breaker) == "open"


def test_a_success_between_them_keeps_it_closed(breaker: Breaker) -> None:
    for _ in range(3 * FAILURES):
        breaker.failed()
        breaker.succeeded()
    assert state(breaker) == "closed"


def test_one_that_says_all_opens_it(breaker: Breaker) -> None:
    breaker.failed(conclusive=True)
    assert state(breaker) == "open"


def test_after_a_pause_one_goes_through(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(conclusive=True)
    clock.now += FIRST_OPEN_SECONDS
    assert state(breaker) == "half-open"
    breaker.attempt()
    assert state(breaker) == "open"  # for other calls


def test_a_trial_that_succeeds_closes_it(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(conclusive=True)
    clock.now += FIRST_OPEN_SECONDS
    breaker.attempt()
    breaker.succeeded()
    assert state(breaker) == "closed"


def test_a_refusal_ends_a_trial_and_nothing_else(breaker: Breaker, clock: Clock) -> None:
    """A full pod refuses sessions although its steps may hang."""
    for _ in range(FAILURES - 1):
        breaker.failed()
    breaker.answered()
    breaker.failed()
    assert state(breaker) == "open"
    breaker.answered()  # to a session opened before
    assert state(breaker) == "open"
    clock.now += FIRST_OPEN_SECONDS
    breaker.attempt()
    breaker.answered()
    assert state(breaker) == "closed"


def test_a_trial_that_fails_doubles_the_pause(breaker: Breaker, clock: Clock) -> None:
    pause = FIRST_OPEN_SECONDS
    breaker.failed(conclusive=True)
    for _ in range(6):
        clock.now += 0.9 * pause
        assert state(breaker) == "open"
        clock.now += 0.2 * pause
        assert state(breaker) == "half-open"
        breaker.attempt()
        breaker.failed()
        pause = min(2 * pause, MAX_OPEN_SECONDS)


def test_those_who_find_the_same_do_not_prolong_it(breaker: Breaker, clock: Clock) -> None:
    for _ in range(50):
        breaker.failed(conclusive=True)
    clock.now += FIRST_OPEN_SECONDS
    assert state(breaker) == "half-open"


def test_a_trial_that_comes_to_nothing_is_followed_by_another(breaker: Breaker, clock: Clock) -> None:
    breaker.failed(conclusive=True)
    clock.now += FIRST_OPEN_SECONDS
    breaker.attempt()
    clock.now += TRIAL_SECONDS
    assert state(breaker) == "half-open"


@pytest.fixture
def told() -> Iterator[list[MutableMapping[str, Any]]]:
    with captured_logs() as lines:
        yield lines


def test_it_is_told_once_that_a_pod_is_left_alone_and_once_that_it_is_back(
    clock: Clock, told: list[MutableMapping[str, Any]]
) -> None:
    breaker = Breaker("pod:1", clock)
    for _ in range(5):
        breaker.failed(conclusive=True)
        clock.now += MAX_OPEN_SECONDS
        breaker.attempt()
    breaker.succeeded()
    breaker.succeeded()
    assert [(each["event"], each["pod"]) for each in told] == [("breaker_opened", "pod:1"), ("breaker_closed", "pod:1")]
