"""Connections that carry multiplexed streams: opened, renewed, drained, lost, and ended if they break the rules."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from specdec.serving.errors import said_by_pod
from specdec.serving.mux import channel as mux_channel
from specdec.serving.mux import send_queue
from specdec.serving.mux.channel import MAX_STRAY, ClientConnection, MuxChannel
from specdec.serving.mux.send_queue import MAX_UNSENT_FRAMES
from specdec.serving.mux.stream import WINDOW
from specdec.v2 import mux_pb2, mux_pb2_grpc
from tests.orchestrator.servers import addresses
from tests.serving.mux_link import SERVICE, Link, Methods, link, readable
from tests.stack import Pod, running, until


async def test_a_renewed_channel_takes_new_streams_and_the_old_one_keeps_its_own() -> None:
    """As after a change of certificates. The old connection ends with its last stream."""
    async with running(Pod(Methods())) as one, running(Pod(Methods())) as other:
        others = [grpc.aio.insecure_channel(other.address)]
        renewals: list[grpc.aio.Channel] = []
        channel = MuxChannel(grpc.aio.insecure_channel(one.address), lambda: renewals.pop() if renewals else None)

        def begin() -> Any:
            return channel.stream_stream(f"/{SERVICE}/echo", bytes, readable)()

        async def echoed(call: Any) -> bool:
            await call.write(b"here")
            return bool(await call.read() == b"here")

        try:
            old = begin()
            assert await echoed(old)
            (connection,) = channel._current.connections
            renewals += others
            new = begin()
            assert await echoed(new)
            assert await echoed(old)
            assert not connection.broken
            await old.write(b"end")
            assert await old.read() is grpc.aio.EOF
            await until(lambda: connection.broken)
            assert await echoed(new)
            await one.server.stop(None)
            assert await echoed(begin())  # at the other pod
        finally:
            await channel.close()


@pytest.mark.parametrize("kind", ["unary_unary", "unary_stream"])
async def test_a_renewed_channel_that_was_only_polled_is_closed_at_the_next_renewal(kind: str) -> None:
    """A pod without sessions is only asked for its health and its capacity."""
    channels = [grpc.aio.insecure_channel("127.0.0.1:1") for _ in range(4)]
    renewals = iter(channels)
    channel = MuxChannel(next(renewals), lambda: next(renewals, None))
    for _ in range(5):
        getattr(channel, kind)(f"/{SERVICE}/none")
    await until(lambda: not channel._closing)
    closed = [each.get_state() is grpc.ChannelConnectivity.SHUTDOWN for each in channels]
    assert closed == [True, True, False, False]
    await channel.close()


async def test_a_renewed_channel_with_a_plain_stream_stays_open() -> None:
    server = grpc.aio.server()
    Methods().register(server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    renewals: list[grpc.aio.Channel] = []
    channel = MuxChannel(grpc.aio.insecure_channel(address), lambda: renewals.pop() if renewals else None)
    try:
        echo = channel.stream_stream(f"/{SERVICE}/echo", bytes, readable)
        with pytest.raises(grpc.aio.AioRpcError):  # the service does not support connections
            await echo().read()
        plain = echo()
        for _ in range(3):
            await plain.write(b"here")
            assert await plain.read() == b"here"
            renewals.append(grpc.aio.insecure_channel(address))
            channel.unary_unary(f"/{SERVICE}/none")
    finally:
        await channel.close()
        await server.stop(None)


async def test_with_its_connection_a_stream_is_lost_and_the_next_one_has_another() -> None:
    async with link() as to:
        calls = [to.begin("echo") for _ in range(3)]
        for call in calls:
            await call.write(b"here")
            assert await call.read() == b"here"
        await to.pod.stop()
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as lost:
                await call.read()
            assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as nobody:
            await to.begin("echo").read()
        assert nobody.value.code() is grpc.StatusCode.UNAVAILABLE
        await to.pod.start()
        await to.answered()


async def test_when_its_caller_is_gone_a_stream_ends() -> None:
    async with link() as to:
        waiting = to.begin("wait")
        assert await waiting.read() == b"here"
        await to.channel.close()
        await until(lambda: to.methods.cancelled == 1)
        with pytest.raises(grpc.aio.AioRpcError) as closed:
            await waiting.read()
        assert closed.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_service_that_drains_ends_with_its_last_stream() -> None:
    async with link() as to:
        last, idle = to.begin("echo"), Link(to.pod, to.methods)
        ended = idle.begin("echo")
        await ended.write(b"end")
        assert await ended.read() is grpc.aio.EOF
        await last.write(b"here")
        assert await last.read() == b"here"
        stopping = asyncio.create_task(to.pod.stop(grace=60))
        await asyncio.sleep(0)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await to.begin("echo").read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        await last.write(b"still here")
        assert await last.read() == b"still here"
        assert not stopping.done()
        await last.write(b"end")
        assert await last.read() is grpc.aio.EOF
        async with asyncio.timeout(10):
            await stopping
        await idle.channel.close()


async def test_a_stream_that_a_draining_service_refuses_was_not_lost() -> None:
    """The caller has not heard of the drain yet. Without a status from the pod, the pod would count as dead."""
    async with link() as to:
        last = to.begin("echo")
        await last.write(b"here")
        assert await last.read() == b"here"
        to.pod.mux.drain()
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await to.begin("echo").read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert said_by_pod(refused.value)


async def test_the_streams_of_a_refused_connection_were_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serving.mux.servicer.MAX_CONNECTIONS", 0)
    async with link() as to:
        with pytest.raises(grpc.aio.AioRpcError, match="0 connections are open") as refused:
            await to.begin("echo").read()
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        assert said_by_pod(refused.value)


async def test_a_service_that_leaves_does_not_keep_new_streams_from_its_successor() -> None:
    """The successor has the same port, as in a rolling restart in place."""
    async with link() as to:
        last = to.begin("echo")
        await last.write(b"here")
        assert await last.read() == b"here"
        stopping = asyncio.create_task(to.pod.stop(grace=60))
        await until(lambda: to.channel._current.connections[-1].leaving)
        successor = Pod(Methods(), to.pod.address)
        await successor.start()
        await to.answered()
        await last.write(b"still here")
        assert await last.read() == b"still here"
        await last.write(b"end")
        await stopping
        await successor.stop()


async def test_a_service_that_knows_no_connections_is_asked_without() -> None:
    """The service is of an earlier release. The test repeats: requests may be in flight when the refusal arrives."""
    for _ in range(50):
        server = grpc.aio.server()
        Methods().register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = MuxChannel(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        try:
            echo = channel.stream_stream(f"/{SERVICE}/echo", bytes, readable)
            with pytest.raises(grpc.aio.AioRpcError) as first:
                await echo().read()
            assert first.value.code() is grpc.StatusCode.UNAVAILABLE
            call = echo()
            await call.write(b"alone")
            assert await call.read() == b"alone"
            call.cancel()
        finally:
            await channel.close()
            await server.stop(None)


async def test_a_service_that_knew_no_connections_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another service, or a proxy without a route, may have answered at its address."""
    monkeypatch.setattr(mux_channel, "PLAIN_SECONDS", 0.05)
    calls = list[bool]()  # whether `Connect` is known

    class Service:
        """A channel to a service that supports connections from the second call on."""

        def stream_stream(self, method: str, *_: Any, **__: Any) -> Any:
            def begin(**_: Any) -> Any:
                calls.append(bool(calls))
                return Connection(calls[-1])

            return begin if method.endswith("Connect") else lambda **_: "a plain stream"

        async def close(self, grace: float | None = None) -> None: ...

    class Connection:
        """A connection that carries nothing; UNIMPLEMENTED unless `known`."""

        def __init__(self, known: bool) -> None:
            self._known, self._ended = known, asyncio.Event()

        async def read(self) -> Any:
            if not self._known:
                raise grpc.aio.AioRpcError(grpc.StatusCode.UNIMPLEMENTED, grpc.aio.Metadata(), grpc.aio.Metadata())
            await self._ended.wait()
            return grpc.aio.EOF

        async def write(self, message: Any) -> None: ...

        async def initial_metadata(self) -> Any:
            return ()

        def done(self) -> bool:
            return not self._known or self._ended.is_set()

        def cancel(self) -> None:
            self._ended.set()

    service: Any = Service()
    channel = MuxChannel(service)
    echo = channel.stream_stream(f"/{SERVICE}/echo", bytes, readable)
    with pytest.raises(grpc.aio.AioRpcError):
        await echo().read()
    assert echo() == "a plain stream"
    async with asyncio.timeout(10):
        while (call := echo()) == "a plain stream":
            await asyncio.sleep(0.01)
    assert calls == [False, True]
    call.cancel()
    await channel.close()


async def test_what_a_broken_connection_had_to_send_is_not_kept() -> None:
    """An unavailable pod is retried repeatedly, each time with a whole prompt."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        channel = MuxChannel(grpc.aio.insecure_channel(f"127.0.0.1:{nobody.getsockname()[1]}"))
        connections = list[Any]()
        for _ in range(3):
            call = channel.stream_stream(f"/{SERVICE}/echo", bytes, readable)()
            connections += [each for each in channel._current.connections if each not in connections]
            with contextlib.suppress(asyncio.InvalidStateError):
                await call.write(bytes(1000))
            with pytest.raises(grpc.aio.AioRpcError):
                await call.read()
        await until(lambda: not channel._current.connections)
        assert all(each.broken and not each._sending._frames for each in connections)
        assert not channel._current._connections
        await channel.close()


async def test_a_connection_that_its_service_leaves_ends_here_too() -> None:
    """Even if the service does not end it."""

    class Leaving(mux_pb2_grpc.MuxServiceServicer):
        ended = 0

        async def Connect(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            try:
                await context.write(mux_pb2.ConnectResponse(frames=[mux_pb2.Frame(end=mux_pb2.End())]))
                await asyncio.Event().wait()
            finally:
                self.ended += 1

    servicer = Leaving()
    async with addresses(mux_pb2_grpc.add_MuxServiceServicer_to_server, servicer) as (address,):
        channel = MuxChannel(grpc.aio.insecure_channel(address))
        call = channel.stream_stream(f"/{SERVICE}/echo", bytes, readable)()
        (connection,) = channel._current.connections
        await until(lambda: connection.leaving)
        assert not connection.broken
        call.cancel()
        await until(lambda: connection.broken and servicer.ended == 1)
        await channel.close()


async def test_a_channel_may_be_closed_at_once() -> None:
    async with link() as to:
        call = to.begin("echo")
        await to.channel.close()
        with pytest.raises(grpc.aio.AioRpcError) as closed:
            await call.read()
        assert closed.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize(
    "breach",
    [
        "twice",
        "nothing",
        "beyond the window",
        "read what was not sent",
        "a flood in one batch",
    ],
)
async def test_a_connection_that_breaks_the_rules_ends(breach: str) -> None:
    """Other connections stay open."""
    begin = mux_pb2.Frame(stream=1, begin=mux_pb2.Begin(method=f"/{SERVICE}/wait"))
    message = mux_pb2.Frame(stream=1, message=bytes(WINDOW // 2))
    more: Any = {
        "twice": [begin],
        "nothing": [mux_pb2.Frame(stream=1)],
        "beyond the window": [message, message, message],
        "read what was not sent": [mux_pb2.Frame(stream=1, credit=2**32 - 1)],
        "a flood in one batch": [[mux_pb2.Frame()] * (MAX_UNSENT_FRAMES + 1)],
    }[breach]
    async with link() as to, grpc.aio.insecure_channel(to.pod.address) as channel:
        other = to.begin("echo")
        carry: Any = mux_pb2_grpc.MuxServiceStub(channel).Connect()  # type: ignore[call-arg]
        await carry.write(mux_pb2.ConnectRequest(frames=[begin]))
        assert (await carry.read()).frames[0].message == b"here"
        for frames in more:
            await carry.write(mux_pb2.ConnectRequest(frames=frames if isinstance(frames, list) else [frames]))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await carry.read()
        assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert to.methods.cancelled == 1
        await other.write(b"still here")
        assert await other.read() == b"still here"


async def frames_to(to: Link, frames: AsyncIterator[list[mux_pb2.Frame]]) -> Any:
    """Open a connection that sends these frames; return its call."""

    async def requests() -> AsyncIterator[mux_pb2.ConnectRequest]:
        async for some in frames:
            yield mux_pb2.ConnectRequest(frames=some)

    stub: Any = mux_pb2_grpc.MuxServiceStub(to.channel._current.channel)
    return stub.Connect(requests())


async def test_a_connection_that_is_asked_and_not_read_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame causes an answer. Without a limit, unread answers took hundreds of megabytes."""
    monkeypatch.setattr(send_queue, "MAX_UNSENT_FRAMES", 2000)
    sent = 0

    async def unknown() -> AsyncIterator[list[mux_pb2.Frame]]:
        nonlocal sent
        begin = mux_pb2.Begin(method="/no/such")
        for first in range(1, 1_000_000, 1000):
            yield [mux_pb2.Frame(stream=number, begin=begin) for number in range(first, first + 1000)]
            sent += 1000

    async with link() as to:
        call = await frames_to(to, unknown())
        await until(lambda: any(connection._sending.overflowed.is_set() for connection in to.pod.mux._connections))
        await to.answered()  # other connections are served
        answers = 0
        with contextlib.suppress(grpc.aio.AioRpcError):  # the server's status, or gRPC's own after a late write
            while True:
                answers += len((await call.read()).frames)
        assert call.done()
        assert answers < sent < 1_000_000


async def test_a_connection_carries_only_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serving.mux.servicer.MAX_STREAMS", 3)
    async with link() as to:
        calls = [to.begin("echo") for _ in range(3)]
        for call in calls:
            await call.write(b"here")
            assert await call.read() == b"here"
        with pytest.raises(grpc.aio.AioRpcError, match="3 streams are open") as refused:
            await to.begin("echo").read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        calls[0].cancel()
        await to.answered()


class Refused:
    """A gRPC call that failed to connect, and whose reader does not know it yet."""

    def __init__(self) -> None:
        self.cancelled = asyncio.Event()

    async def initial_metadata(self) -> tuple[()]:
        return ()

    def done(self) -> bool:
        return True

    async def write(self, request: Any) -> None:
        raise asyncio.InvalidStateError

    async def read(self) -> Any:
        await self.cancelled.wait()
        return grpc.aio.EOF

    def cancel(self) -> None:
        self.cancelled.set()


async def test_a_connection_that_does_not_come_about_has_reached_nobody() -> None:
    """gRPC provides initial metadata even for a call that failed to connect."""
    refused = Refused()
    connection = ClientConnection(refused)
    call = connection.begin(mux_pb2.Begin(method="/tests.Methods/echo"), None, bytes, bytes)
    await asyncio.wait_for(refused.cancelled.wait(), 30)
    assert not call.reached
    await connection.close()


class Saying:
    """The call of a connection whose service sends these frames."""

    def __init__(self, *frames: mux_pb2.Frame) -> None:
        self._frames: Any = [mux_pb2.ConnectResponse(frames=[frame]) for frame in frames]
        self._ended = asyncio.Event()

    async def initial_metadata(self) -> tuple[()]:
        return ()

    def done(self) -> bool:
        return self._ended.is_set()

    async def read(self) -> Any:
        if self._frames:
            return self._frames.pop(0)
        await self._ended.wait()
        return grpc.aio.EOF

    async def write(self, request: Any) -> None:
        pass

    def cancel(self) -> None:
        self._ended.set()


@pytest.mark.parametrize("stray", [[999], [1] * (MAX_STRAY + 1)], ids=["never begun", "ended long ago"])
async def test_frames_that_no_stream_takes_end_a_connection(stray: list[int]) -> None:
    end = mux_pb2.Frame(stream=1, end=mux_pb2.End())
    connection = ClientConnection(Saying(end, *(mux_pb2.Frame(stream=number, message=b"x") for number in stray)))
    first, second = (connection.begin(mux_pb2.Begin(method="/a/b"), None, bytes, bytes) for _ in range(2))
    assert await first.read() is grpc.aio.EOF
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await second.read()
    assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await connection.close()
