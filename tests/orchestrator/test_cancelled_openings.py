"""A tenant that cancels sessions while they open has fewer places while other tenants compete."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pods.admission import (
    CANCELLED_SECONDS,
    MAX_CANCELLED,
    MAX_WAITING,
    PRESENT_SECONDS,
    Admission,
    CancelledOpenings,
    PodLoad,
)
from specdec.serving.errors import TenantLimitError
from specdec.serving.pods.breaker import Breaker
from specdec.v2 import model_pb2


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def storm(cancelled: CancelledOpenings, clock: Clock, seconds: float, a_second: int) -> int:
    """Open sessions and cancel them immediately, as often as admitted; return how often."""
    opened = 0
    for _ in range(int(seconds * a_second)):
        clock.now += 1 / a_second
        if not cancelled.wait("storm", 0):
            cancelled.opening("storm")
            cancelled.add("storm", clock.now)
            opened += 1
    return opened


@given(st.integers(20, 2000), st.floats(0.5, 5))
def test_a_storm_of_cancelled_requests_opens_a_few_sessions(a_second: int, seconds: float) -> None:
    clock = Clock()
    cancelled = CancelledOpenings(clock)
    cancelled.begun("other")
    assert storm(cancelled, clock, seconds, a_second) <= MAX_CANCELLED * (1 + seconds / CANCELLED_SECONDS)
    assert cancelled.wait("other", 0) == 0
    assert cancelled.wait("third", 0) == 0


def test_tenants_that_are_gone_are_forgotten() -> None:
    """Without keys, a caller may send any tenant name."""
    clock = Clock()
    cancelled = CancelledOpenings(clock)
    for number in range(100):
        cancelled.add(f"tenant {number}", clock.now)
        clock.now += CANCELLED_SECONDS / 4
    assert len(cancelled._kept) <= 5


def test_places_are_free_in_the_order_of_their_openings() -> None:
    clock = Clock()
    cancelled = CancelledOpenings(clock)
    cancelled.begun("other")
    begin = clock.now
    clock.now += 0.5
    for number in reversed(range(MAX_CANCELLED)):
        cancelled.add("storm", begin + number / 100)
    assert cancelled.wait("storm", 0) == pytest.approx(CANCELLED_SECONDS - 0.5)
    clock.now = begin + CANCELLED_SECONDS
    assert cancelled.wait("storm", 0) == 0


def test_nobody_waits_where_there_is_nobody_else() -> None:
    clock = Clock()
    cancelled = CancelledOpenings(clock)
    assert storm(cancelled, clock, 1.0, 500) == 500
    cancelled.opening("other")
    assert cancelled.wait("storm", 0) > 0
    clock.now += PRESENT_SECONDS + 1
    assert storm(cancelled, clock, 1.0, 500) == 500


def test_a_wait_is_as_long_as_it_says() -> None:
    clock = Clock()
    cancelled = CancelledOpenings(clock)
    cancelled.begun("other")
    storm(cancelled, clock, 0.5, 200)
    wait = cancelled.wait("storm", 0)
    assert 0 < wait <= CANCELLED_SECONDS
    clock.now += wait - 1e-6
    assert cancelled.wait("storm", 0) > 0
    clock.now += 2e-6
    assert cancelled.wait("storm", 0) == 0


def test_who_cancels_late_or_never_does_not_wait() -> None:
    clock = Clock()
    cancelled = CancelledOpenings(clock)
    cancelled.begun("other")
    for _ in range(100):
        cancelled.opening("own")
        cancelled.add("own", clock.now - CANCELLED_SECONDS)
        assert cancelled.wait("own", 60) == 0
    cancelled.ended("other")
    assert not cancelled._sessions
    assert not cancelled._kept


def site() -> tuple[Clock, Admission]:
    clock = Clock()
    load = PodLoad(clock)
    load.report(model_pb2.PodCapacity(room=1000))
    return clock, Admission(load, Breaker(clock=clock), clock)


async def test_requests_wait_for_a_place_and_those_of_others_do_not() -> None:
    clock, admission = site()
    with admission.session("other"):
        for _ in range(MAX_CANCELLED):
            async with admission.opening("storm"):
                pass
            admission.cancelled.add("storm", clock.now)

        async def enter(tenant: str) -> None:
            async with admission.opening(tenant):
                pass

        waiting = [asyncio.create_task(enter("storm")) for _ in range(MAX_WAITING)]
        await asyncio.sleep(0)
        await enter("other")
        assert not any(task.done() for task in waiting)
        assert isinstance(admission.refusal("storm"), TenantLimitError)
        assert admission.refusal("other") is None
        clock.now += CANCELLED_SECONDS
        await enter("other")  # when it leaves, waiting requests wake
        await asyncio.gather(*waiting)
    assert not admission._waiting


async def test_a_request_that_is_cancelled_while_it_waits_has_had_no_place() -> None:
    clock, admission = site()
    with admission.session("other"):
        for _ in range(MAX_CANCELLED):
            admission.cancelled.add("storm", clock.now)

        async def enter() -> None:
            async with admission.opening("storm"):
                raise AssertionError("it has a place")

        waiting = asyncio.create_task(enter())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert not admission._waiting
    assert not admission._openings


class TickingClock(Clock):
    """A clock that advances at each reading."""

    def __call__(self) -> float:
        self.now += 0.0001
        return self.now


async def test_a_place_that_becomes_free_between_two_looks_is_taken() -> None:
    clock = TickingClock()
    load = PodLoad(clock)
    admission = Admission(load, Breaker(clock=clock), clock)
    load.report(model_pb2.PodCapacity(room=100), 1000)
    admission.cancelled.begun("other")
    begin = clock.now
    for _ in range(MAX_CANCELLED):
        admission.cancelled.add("storm", begin)
    for earlier in range(10):
        clock.now = begin + CANCELLED_SECONDS - 0.0001 * earlier
        async with asyncio.timeout(10), admission.opening("storm"):
            pass
        for _ in range(MAX_CANCELLED):
            clock.now = begin
            admission.cancelled.add("storm", begin)
