"""Both clients: deadlines and cancellation end calls, and free the server."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from typing import Any, cast

import grpc
import pytest
from google.rpc import code_pb2

from specdec.client import AsyncClient, AsyncStream, Cancelled, Client, DeadlineExceeded
from tests.client.calls import BREAK, EVENTUALLY, ROUNDING, retry_info, until, written
from tests.client.fake_server import TEXT, TOKENS, Act, FakeServer, rich

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


async def test_deadline_of_a_call_replaces_the_clients(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        await client.models()  # connects first, which may be slow on a busy machine
        stream = client.generate("hi", timeout=2.0)
        assert written([await anext(stream), await anext(stream)])[1] == TOKENS[:6]
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
        await until(server.freed)
        assert server.calls[0].seconds_left <= 2.0 * ROUNDING


async def test_no_deadline(connect: Any) -> None:
    async with FakeServer() as server, connect(server) as client:
        await client.complete("hi", timeout=None)
    assert server.calls[0].seconds_left is None or server.calls[0].seconds_left > 1e6


async def test_a_retry_has_the_time_that_is_left(connect: Any) -> None:
    acts = [Act(3, "abort"), rich(code_pb2.UNAVAILABLE, retry_info(0, 250_000_000))]
    async with FakeServer(*acts) as server, connect(server) as client:
        assert written([chunk async for chunk in client.generate("hi", timeout=5.0)]) == (TEXT, TOKENS)
    assert server.calls[2].seconds_left <= 4.7 * ROUNDING  # after two pauses: at least 50 ms, and the server's delay


async def test_the_deadline_ends_the_retries(connect: Any) -> None:
    async with FakeServer(script=itertools.repeat(BREAK)) as server, connect(server, max_retries=10**6) as client:
        with pytest.raises(DeadlineExceeded):
            [chunk async for chunk in client.generate("hi", timeout=2.0)]
    assert len(server.calls) > 1


async def test_does_not_wait_past_the_deadline(connect: Any) -> None:
    async with FakeServer(rich(code_pb2.UNAVAILABLE, retry_info(3600))) as server, connect(server) as client:
        with pytest.raises(DeadlineExceeded, match="refused"):
            await client.complete("hi")


async def test_cancel_frees_the_server(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        stream = client.generate("hi")
        assert (await anext(stream)).tokens == TOKENS[:3]
        stream.cancel()
        await until(server.freed)
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_cancel_ends_a_pending_read(connect: Any) -> None:
    async with FakeServer(Act(0, "hold")) as server, connect(server) as client:
        stream = client.generate("hi")
        reading = asyncio.create_task(stream.__anext__())
        await until(server.held)
        stream.cancel()
        with pytest.raises(Cancelled):
            await reading


async def test_cancel_ends_a_pause(connect: Any) -> None:
    async with FakeServer(rich(code_pb2.UNAVAILABLE, retry_info(3600))) as server, connect(server) as client:
        stream = client.generate("hi", timeout=None)
        reading = asyncio.create_task(stream.__anext__())
        await until(server.called)
        stream.cancel()
        with pytest.raises(Cancelled):
            await reading


class Broken:
    """A gRPC call that has failed."""

    def __init__(self) -> None:
        self.cancelled = False

    def __aiter__(self) -> Broken:
        return self

    async def __anext__(self) -> Any:
        raise grpc.RpcError

    def cancel(self) -> bool:
        self.cancelled = True
        return True


class Pausing:
    """A transcript whose pause has just ended, but was not noticed by its stream, when `cancel` is called."""

    cancel: Callable[[], None]

    def ask(self) -> tuple[str, None, None]:
        return "", None, None

    def record(self, response: Any) -> Any:
        raise AssertionError

    def pause(self, error: grpc.RpcError) -> float:
        loop = asyncio.get_running_loop()

        def outlast_the_pause() -> None:
            time.sleep(0.002)
            loop.call_soon(loop.call_soon, self.cancel)  # runs right after the timer of the pause

        loop.call_soon(outlast_the_pause)
        return 0.001


async def test_cancel_at_the_end_of_a_pause_leaves_no_call() -> None:
    calls = list[Broken]()

    def send(*args: Any, **options: Any) -> Broken:
        calls.append(Broken())
        return calls[-1]

    transcript = Pausing()
    stream = AsyncStream(send, cast("Any", transcript), "", asyncio.Event())
    transcript.cancel = stream.cancel
    with pytest.raises(Cancelled):
        await anext(stream)
    assert all(call.cancelled for call in calls)


async def test_leaving_the_context_frees_the_server(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        async with client.generate("hi") as stream:
            await anext(stream)
        await until(server.freed)


async def test_dropping_a_synchronous_stream_frees_the_server() -> None:
    def take_one(client: Client) -> None:
        for _ in client.generate("hi"):
            break

    async with FakeServer(Act(6, "hold")) as server:
        with Client(server.address) as client:
            await asyncio.to_thread(take_one, client)
            await until(server.freed)


async def test_cancelling_the_task_frees_the_server() -> None:
    async with FakeServer(Act(0, "hold")) as server, AsyncClient(server.address) as client:
        stream = client.generate("hi")
        reading = asyncio.create_task(stream.__anext__())
        await until(server.held)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(server.freed)
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_closing_the_client_ends_its_calls(connect: Any) -> None:
    async with FakeServer(Act(0, "hold")) as server, connect(server) as client:
        reading = asyncio.create_task(client.generate("hi").__anext__())
        await until(server.held)
        await client.close()
        with pytest.raises(Cancelled):
            await reading


async def test_closing_the_client_ends_a_stream_of_samples_that_has_begun(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        stream = client.generate("hi", n=2)
        await anext(stream)
        await until(server.held)
        await client.close()
        with pytest.raises(Cancelled):
            [chunk async for chunk in stream]


async def test_closing_the_client_ends_calls_that_wait_for_their_next_try(connect: Any) -> None:
    """The calls end immediately and without another connection."""
    refusal = rich(code_pb2.UNAVAILABLE, retry_info(3600))
    async with FakeServer(refusal, refusal) as server, connect(server) as client:
        asking = client.generate("hi", timeout=None).__anext__(), client.complete("hi", timeout=None)
        calls = [asyncio.ensure_future(each) for each in asking]
        async with asyncio.timeout(EVENTUALLY):
            while len(server.calls) < len(calls):
                await asyncio.sleep(0.01)
        for _ in range(2):  # answered on the same connection after the refusals: the calls are backing off by then
            await client.models()
        await client.close()
        for call in calls:
            with pytest.raises(Cancelled):
                await call
    assert len(server.calls) == len(calls)


class ClosedInBetween(Client):
    """A client that another thread closes between the choice of a channel and the call on it."""

    def _stub(self, *of: Any) -> Any:
        stub = super()._stub(*of)
        self.close()
        return stub


@pytest.mark.parametrize("call", [lambda client: client.models(), lambda client: client.generate("hi")])
async def test_a_call_that_begins_while_the_client_is_closed_is_cancelled(call: Callable[[Client], object]) -> None:
    with pytest.raises(Cancelled, match="the client was closed"):
        call(ClosedInBetween("127.0.0.1:1", max_retries=0))


async def test_cancelling_the_task_during_a_pause_cancels_the_stream() -> None:
    refusal = rich(code_pb2.UNAVAILABLE, retry_info(3600))
    async with FakeServer(refusal) as server, AsyncClient(server.address, timeout=None) as client:
        stream = client.generate("hi")
        reading = asyncio.create_task(stream.__anext__())
        async with asyncio.timeout(EVENTUALLY):
            while not server.calls:
                await asyncio.sleep(0.01)
        for _ in range(2):  # the refusal has arrived by then
            await client.models()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        with pytest.raises(Cancelled):
            await anext(stream)
    assert len(server.calls) == 1
