"""A session's requests reach the worker in small batches, and its responses wait for their reader."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from specdec.engine.kv.slots import PoolFullError
from specdec.serving.errors import DeadlineError, EngineLostError, OverloadedError
from specdec.serving.opening import Openings
from specdec.serving.response_queue import MAX_WAITING, ResponseQueue
from specdec.serving.session_stream import FULL_SECONDS, INBOX_REQUESTS, SessionServicer
from specdec.serving.timeline import Timeline
from specdec.serving.worker import Worker
from specdec.v2 import verifier_pb2

OPEN = verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(prompt_tokens=[1]))
MORE = verifier_pb2.VerifyRequest(consumed=verifier_pb2.Consumed(tokens=1))


class Turns(Worker):
    """A worker that processes its inbox when `let` is called, in the caller's thread."""

    def __init__(self) -> None:
        super().__init__("turns")
        self.turns = 0

    def turn(self) -> float | None:
        return None

    def let(self) -> None:
        self._receive(0)


class Sessions(SessionServicer[Any, verifier_pb2.VerifyRequest, verifier_pb2.VerifyResponse]):
    """A servicer that counts its sessions' requests."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker, 10)
        self.acted = 0

    def parse(self, request: verifier_pb2.VerifyRequest, deadline: float | None) -> Any:
        return object()

    def attach(self, session: Any, responses: ResponseQueue[verifier_pb2.VerifyResponse], timeline: Timeline) -> None:
        pass

    def detach(self, session: Any) -> None:
        pass

    def act(self, session: Any, request: verifier_pb2.VerifyRequest, arrived: float) -> None:
        self.acted += 1

    def opened(self, session: Any) -> verifier_pb2.VerifyResponse:
        return verifier_pb2.VerifyResponse()

    def heartbeat(self, session: Any) -> verifier_pb2.VerifyResponse:
        return verifier_pb2.VerifyResponse()

    def is_last(self, response: verifier_pb2.VerifyResponse) -> bool:
        return False


class Context:
    """A call's context that records what is written."""

    def __init__(self) -> None:
        self.written: list[Any] = []

    def time_remaining(self) -> None:
        pass

    async def write(self, response: Any) -> None:
        self.written.append(response)


class Flood:
    """Requests of a session: `open`, then others without end."""

    def __init__(self) -> None:
        self.read = 0

    async def __aiter__(self) -> AsyncIterator[verifier_pb2.VerifyRequest]:
        yield OPEN
        while True:
            self.read += 1
            yield MORE


async def settled() -> None:
    """Let all tasks proceed until they are blocked."""
    for _ in range(50):
        await asyncio.sleep(0)


async def test_a_flood_waits_for_its_worker() -> None:
    """At most INBOX_REQUESTS of a session are in memory, and one turn handles no more."""
    worker, flood = Turns(), Flood()
    sessions = Sessions(worker)
    context: Any = Context()
    serving = asyncio.create_task(sessions.run(aiter(flood), context))
    for turn in range(1, 4):
        await settled()
        assert flood.read == INBOX_REQUESTS * turn
        worker.let()
        assert sessions.acted == INBOX_REQUESTS * turn
    serving.cancel()
    await asyncio.wait([serving])


class Placing(Sessions):
    """A servicer that opens sessions once they have memory, and refuses them if it is `full`."""

    place_seconds = 3600.0
    full = False

    def attach(self, session: Any, responses: ResponseQueue[verifier_pb2.VerifyResponse], timeline: Timeline) -> None:
        if self.full:
            raise PoolFullError(2, 1)


async def test_who_gets_no_memory_is_refused_and_not_opened_first() -> None:
    for full in (False, True):
        worker, context = Turns(), Context()
        sessions = Placing(worker)
        sessions.full = full
        stream: Any = context
        serving = asyncio.create_task(sessions.run(aiter(Flood()), stream))
        await settled()
        assert not context.written
        worker.let()
        await settled()
        assert len(context.written) == (not full)
        serving.cancel()
        if full:
            with pytest.raises(OverloadedError) as refused:
                await serving
            assert refused.value.retry_after == FULL_SECONDS


async def test_an_answer_does_not_wait_for_a_long_step() -> None:
    """Without a timely answer, the caller would consider the pod lost."""
    sessions, context = Placing(Turns()), Context()
    sessions.place_seconds = 0.01
    stream: Any = context
    serving = asyncio.create_task(sessions.run(aiter(Flood()), stream))
    async with asyncio.timeout(20):
        while not context.written:
            await asyncio.sleep(0.01)
    serving.cancel()
    await asyncio.wait([serving])


async def test_a_session_that_does_not_open_is_ended() -> None:
    async def silence() -> AsyncIterator[verifier_pb2.VerifyRequest]:
        await asyncio.Event().wait()
        yield OPEN

    sessions = Sessions(Turns())
    sessions._openings = Openings(0.01)
    context: Any = Context()
    with pytest.raises(DeadlineError):
        await sessions.run(silence(), context)
    assert sessions.room == 10


async def test_a_pod_whose_engine_is_lost_takes_no_session() -> None:
    worker = Turns()
    sessions = Sessions(worker)
    worker.works = False
    context: Any = Context()
    with pytest.raises(EngineLostError):
        await sessions.run(aiter(Flood()), context)
    assert not sessions.works


async def test_a_response_queue_tells_when_nobody_reads_it() -> None:
    class Slow:
        """A stream that accepts one message."""

        def __init__(self) -> None:
            self.may_read = asyncio.Event()

        async def write(self, message: str) -> None:
            await self.may_read.wait()

    responses: ResponseQueue[str] = ResponseQueue()
    stream: Any = Slow()
    writing = asyncio.create_task(responses.write_to(stream, heartbeat=lambda: "alive"))
    for number in range(MAX_WAITING + 1):
        assert not responses.full
        responses.send(str(number))
        await asyncio.sleep(0)
    await settled()
    assert responses.full
    stream.may_read.set()
    await settled()
    assert not responses.full
    writing.cancel()
    await asyncio.wait([writing])


async def test_an_unexpected_error_ends_the_stream_as_it_is() -> None:
    """The interceptor turns it into a status."""
    responses: ResponseQueue[str] = ResponseQueue()
    context: Any = Context()
    responses.send(KeyError("somewhere inside"))
    with pytest.raises(KeyError):
        await responses.write_to(context, heartbeat=lambda: "alive")
