"""While free capacity is unknown, one request at a time tries a verifier; once that is full, none does."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.pods.admission import (
    MAX_OPENINGS,
    REFUSED_SECONDS,
    STALE_SECONDS,
    Admission,
    LeftAloneError,
    PodLoad,
)
from specdec.serving.errors import OverloadedError, PeerLostError
from specdec.serving.pods.breaker import Breaker
from specdec.v2 import model_pb2


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


class Verifier:
    """Admits a number of sessions when allowed to; reports how many are left."""

    def __init__(self, room: int) -> None:
        self.clock = Clock()
        self.load = PodLoad(self.clock)
        self.breaker = Breaker(clock=self.clock)
        self.admission = Admission(self.load, self.breaker)
        self.room = room
        self.sessions = 0
        self.asked = 0
        self.answers = asyncio.Event()

    async def open(self, tenant: str = "", *, again: bool = False) -> None:
        async with self.admission.opening(tenant, again=again):
            self.asked += 1
            await self.answers.wait()
            if not self.room and not again:
                raise OverloadedError("full", retry_after=2.5)
            self.room -= not again
            self.sessions += 1
            self.load.report(model_pb2.PodCapacity(sessions=self.sessions, room=self.room, wait_us=2_500_000))


async def outcomes(verifier: Verifier, requests: int) -> list[BaseException | None]:
    opening = [asyncio.create_task(verifier.open()) for _ in range(requests)]
    await asyncio.sleep(0)
    verifier.answers.set()
    return await asyncio.gather(*opening, return_exceptions=True)


async def test_one_finds_out_how_much_room_there_is() -> None:
    verifier = Verifier(room=0)
    results = await outcomes(verifier, 100)
    assert verifier.asked == 1
    assert all(isinstance(r, OverloadedError) and r.retry_after == 2.5 for r in results)


async def test_those_beyond_the_room_are_refused_without_asking() -> None:
    verifier = Verifier(room=20)
    results = await outcomes(verifier, 100)
    assert verifier.asked == 20
    assert [type(r) for r in results].count(OverloadedError) == 80
    assert all(r.retry_after == 2.5 for r in results if isinstance(r, OverloadedError))


async def test_a_tenant_that_opens_many_does_not_keep_out_the_first_of_another() -> None:
    verifier = Verifier(room=20)
    verifier.load.report(model_pb2.PodCapacity(room=20, wait_us=2_500_000))
    flood = [asyncio.create_task(verifier.open("flood")) for _ in range(100)]
    await asyncio.sleep(0)
    others = [asyncio.create_task(verifier.open(tenant)) for tenant in ("one", "other", "one")]
    await asyncio.sleep(0)
    assert verifier.asked == 22
    verifier.room = 22
    verifier.answers.set()
    results = await asyncio.gather(*flood, *others, return_exceptions=True)
    refused = [place for place, result in enumerate(results) if isinstance(result, OverloadedError)]
    assert refused == [*range(20, 100), 102]
    assert not verifier.admission._openings


async def test_no_more_at_once_than_are_good_for_it() -> None:
    verifier = Verifier(room=10 * MAX_OPENINGS)
    verifier.load.report(model_pb2.PodCapacity(room=10 * MAX_OPENINGS))
    opening = [asyncio.create_task(verifier.open()) for _ in range(3 * MAX_OPENINGS)]
    await asyncio.sleep(0)
    assert verifier.asked == MAX_OPENINGS
    verifier.answers.set()
    await asyncio.gather(*opening)
    assert verifier.sessions == 3 * MAX_OPENINGS


async def test_who_is_taken_up_again_is_not_held_up() -> None:
    verifier = Verifier(room=0)
    verifier.load.report(model_pb2.PodCapacity(sessions=9, room=0))
    verifier.answers.set()
    with pytest.raises(OverloadedError, match="9 sessions"):
        await verifier.open()
    await verifier.open(again=True)
    assert verifier.sessions == 1


@pytest.mark.parametrize(("asked", "seconds"), [(True, REFUSED_SECONDS), (False, STALE_SECONDS)])
async def test_what_was_told_stands_for_a_while_only(asked: bool, seconds: float) -> None:
    verifier = Verifier(room=0)
    verifier.answers.set()
    if asked:
        with pytest.raises(OverloadedError, match="full"):
            await verifier.open()
    else:
        verifier.load.report(model_pb2.PodCapacity(room=0))
    verifier.clock.now += 0.9 * seconds
    with pytest.raises(OverloadedError, match="no capacity"):
        await verifier.open()
    verifier.clock.now += 0.2 * seconds
    verifier.room = 1
    await verifier.open()
    assert verifier.sessions == 1


async def test_any_number_of_sessions_can_be_told_on() -> None:
    load = PodLoad()
    load.report(model_pb2.PodCapacity(sessions=2**32 - 1))
    with load.session():
        assert load.now is not None
        assert load.now.sessions == 2**32 - 1


async def test_other_errors_shut_nobody_out() -> None:
    admission = Admission(PodLoad(), Breaker())
    with pytest.raises(PeerLostError):
        async with admission.opening():
            raise PeerLostError("gone", "VERIFIER_LOST")
    async with admission.opening():
        pass


async def test_a_verifier_that_does_not_answer_is_found_out_once() -> None:
    breaker = Breaker()
    admission = Admission(PodLoad(), breaker)
    asked = 0
    silence = asyncio.Event()

    async def enter() -> None:
        nonlocal asked
        try:
            async with admission.opening():
                asked += 1
                await silence.wait()
                raise PeerLostError("silent", "VERIFIER_LOST")
        except PeerLostError:
            breaker.failed(conclusive=True)
            raise

    entering = [asyncio.create_task(enter()) for _ in range(20)]
    await asyncio.sleep(0)
    silence.set()
    results = await asyncio.gather(*entering, return_exceptions=True)
    assert asked == 1
    assert [type(r) for r in results].count(LeftAloneError) == 19


async def test_a_refusal_tells_nothing_of_other_processes_sessions() -> None:
    """The next caller is told the number known before, and the full pod is not taken for the emptiest."""
    load = PodLoad(Clock())
    admission = Admission(load, Breaker())
    load.report(model_pb2.PodCapacity(sessions=640, room=1))
    with pytest.raises(OverloadedError, match="of the verifier"):
        async with admission.opening("a"):
            raise OverloadedError("of the verifier", 3.0)
    with pytest.raises(OverloadedError, match="has 640 sessions"):
        async with admission.opening("b"):
            pass
    assert load.sessions == 640
