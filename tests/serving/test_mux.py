"""Multiplexed streams behave like gRPC streams: order, statuses, deadlines, cancellation, flow control; over real
sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
import structlog
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from specdec.serving.errors import OverloadedError, ProtocolError, from_rpc
from specdec.serving.mux.channel import ClientConnection, MuxChannel
from specdec.serving.mux.send_queue import MAX_UNSENT_FRAMES, SendQueue
from specdec.serving.mux.stream import MAX_BYTES, OVERHEAD, WINDOW, ByteCounters, MuxStream
from specdec.serving.process.server import CHANNEL_OPTIONS
from specdec.v2 import mux_pb2, mux_pb2_grpc
from specdec.wire.request_id import REQUEST_ID
from tests.orchestrator.servers import addresses
from tests.stack import Pod, running, until

SERVICE = "tests.Methods"


class Methods:
    """A service with bytes as messages."""

    name = SERVICE

    def __init__(self) -> None:
        self.cancelled = 0
        self.written = 0  # messages sent by `flood`
        self.request_ids: list[Any] = []

    def register(self, server: Any) -> None:
        methods = {name: self._method(name) for name in ("echo", "refuse", "wait", "flood", "fail", "vanish")}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_registered_method_handlers(SERVICE, methods)

    async def close(self) -> None:
        pass

    def _method(self, name: str) -> Any:
        return grpc.stream_stream_rpc_method_handler(getattr(self, name), _readable, bytes)

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Echo messages until "end"."""
        async for request in requests:
            if request == b"end":
                return
            await context.write(request)

    async def refuse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        raise OverloadedError("no room", retry_after=2.5)

    async def fail(self, requests: AsyncIterator[bytes], context: Any) -> None:
        raise KeyError("a mistake")

    async def vanish(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Fail without a status."""
        raise grpc.aio.UsageError

    async def wait(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Wait for ever."""
        self.request_ids.append(structlog.contextvars.get_contextvars()["request_id"])
        try:
            await context.write(b"here")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def flood(self, requests: AsyncIterator[bytes], context: Any) -> None:
        while True:
            await context.write(bytes(WINDOW // 8 - OVERHEAD))
            self.written += 1


def _readable(message: bytes) -> bytes:
    if message == b"unreadable":
        raise DecodeError
    return message


class Link:
    """A mux channel to `methods` behind a pod's port."""

    def __init__(self, pod: Pod, methods: Methods) -> None:
        self.pod = pod
        self.methods = methods
        self.channel = MuxChannel(grpc.aio.insecure_channel(pod.address, options=CHANNEL_OPTIONS))

    def begin(self, method: str, **options: Any) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/{method}", bytes, _readable)(**options)

    async def answered(self) -> None:
        """Wait until a new stream is served: gRPC leaves old connections, and tries new ones, on its own schedule."""
        async with asyncio.timeout(60):
            while True:
                call = self.begin("echo")
                try:
                    await call.write(b"new")
                    assert await call.read() == b"new"
                    return
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def link() -> AsyncIterator[Link]:
    methods = Methods()
    async with running(Pod(methods)) as pod:
        found = Link(pod, methods)
        try:
            yield found
        finally:
            await found.channel.close()


async def test_a_renewed_channel_takes_new_streams_and_the_old_one_keeps_its_own() -> None:
    """As after a change of certificates: the old connection ends with its last stream."""
    async with running(Pod(Methods())) as one, running(Pod(Methods())) as other:
        others = [grpc.aio.insecure_channel(other.address)]
        renewals: list[grpc.aio.Channel] = []
        channel = MuxChannel(grpc.aio.insecure_channel(one.address), lambda: renewals.pop() if renewals else None)

        def begin() -> Any:
            return channel.stream_stream(f"/{SERVICE}/echo", bytes, _readable)()

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
            assert await echoed(begin())  # at the other one
        finally:
            await channel.close()


async def test_bytes_of_messages_are_counted() -> None:
    async with link() as to:
        calls = [to.begin("echo") for _ in range(2)]
        for call, message in zip(calls, (b"four", b"sixsix"), strict=True):
            await call.write(message)
            assert await call.read() == message
        assert to.pod.mux.traffic == ByteCounters(sent=10, received=10)
        await calls[0].write(b"end")
        assert await calls[0].read() is grpc.aio.EOF
        assert to.pod.mux.traffic == ByteCounters(sent=10, received=13)


async def test_streams_do_not_mix() -> None:
    async with link() as to:

        async def one(number: int) -> list[bytes]:
            call = to.begin("echo")
            for index in range(50):
                await call.write(f"{number}:{index}".encode())
            got = [await call.read() for _ in range(50)]
            await call.write(b"end")
            assert await call.read() is grpc.aio.EOF
            assert await call.read() is grpc.aio.EOF
            return got

        texts = await asyncio.gather(*map(one, range(20)))
        assert texts == [[f"{number}:{index}".encode() for index in range(50)] for number in range(20)]


async def test_what_is_said_at_the_same_time_goes_together() -> None:
    """Bundling the messages of one step of all sessions is the purpose of a multiplexed connection."""
    bundles = []

    async def write(frames: Sequence[mux_pb2.Frame]) -> None:
        bundles.append([frame.stream for frame in frames])
        await asyncio.sleep(0.01)

    sending = SendQueue()
    streams = [MuxStream(number, sending) for number in range(64)]
    writing = asyncio.create_task(sending.write(write))
    for _ in range(3):
        await asyncio.gather(*(stream.send(b"commit") for stream in streams))
        await until(lambda: not sending._frames)
    sending.finish()
    await writing
    assert bundles == [list(range(64))] * 3


async def test_a_batch_is_no_larger_than_it_may_be() -> None:
    sizes = []

    async def write(frames: Sequence[mux_pb2.Frame]) -> None:
        sizes.append(sum(len(frame.message) for frame in frames))

    sending = SendQueue()
    for size in (100_000, 100_000, 100_000, 1_000_000, 10):
        sending.put(mux_pb2.Frame(message=bytes(size)))
    sending.finish()
    await sending.write(write)
    assert sizes == [200_000, 100_000, 1_000_000, 10]


async def test_a_refusal_keeps_what_it_says() -> None:
    async with link() as to:
        other = to.begin("echo")
        call = to.begin("refuse")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
        error = from_rpc(refused.value, "methods")
        assert isinstance(error, OverloadedError)
        assert error.retry_after == 2.5
        with pytest.raises(grpc.aio.AioRpcError, match="internal error") as failed:
            await to.begin("fail").read()
        assert failed.value.code() is grpc.StatusCode.INTERNAL
        with pytest.raises(grpc.aio.AioRpcError, match=r"no stream '/tests\.Methods/nothing'") as unknown:
            await to.begin("nothing").read()
        assert unknown.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await other.write(b"still here")
        assert await other.read() == b"still here"
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(b"to nobody")


async def test_a_cancelled_stream_ends_at_both_sides() -> None:
    async with link() as to:
        call = to.begin("wait", metadata=((REQUEST_ID, "abc"),))
        assert await call.read() == b"here"
        reading = asyncio.create_task(call.read())
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([reading])
        assert reading.cancelled()
        await until(lambda: to.methods.cancelled == 1)
        assert to.methods.request_ids == ["abc"]


async def test_a_deadline_ends_it_at_both_sides() -> None:
    async with link() as to:
        call = to.begin("wait", timeout=1.0)
        assert 0 < call.time_remaining() <= 1.0
        assert await call.read() == b"here"
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call.read()
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: to.methods.cancelled == 1)


async def test_a_callee_keeps_the_deadline_by_itself() -> None:
    """The caller may have disappeared silently."""
    async with link() as to, grpc.aio.insecure_channel(to.pod.address) as channel:
        carry: Any = mux_pb2_grpc.MuxServiceStub(channel).Connect()  # type: ignore[call-arg]
        begin = mux_pb2.Begin(method=f"/{SERVICE}/wait", timeout_us=100_000)
        await carry.write(mux_pb2.ConnectRequest(frames=[mux_pb2.Frame(stream=1, begin=begin)]))
        await until(lambda: to.methods.cancelled == 1)


async def test_who_does_not_read_holds_up_nobody_else() -> None:
    async with link() as to:
        flood, echo = to.begin("flood"), to.begin("echo")
        await until(lambda: to.methods.written == 8)
        for index in range(100):
            await echo.write(b"%d" % index)
            assert await echo.read() == b"%d" % index
        assert to.methods.written == 8  # exactly a full WINDOW
        for _ in range(40):
            assert len(await flood.read()) == WINDOW // 8 - OVERHEAD
        await until(lambda: to.methods.written >= 40)
        flood.cancel()


async def test_a_message_that_cannot_be_read_is_none() -> None:
    async with link() as to:
        call = to.begin("echo")
        await call.write(b"fine")
        assert await call.read() == b"fine"
        await call.write(b"unreadable")  # by the method, which ends
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed"):
            await call.read()
        strict = to.channel.stream_stream(f"/{SERVICE}/wait", bytes, lambda _: _readable(b"unreadable"))()
        assert await strict.read() is None


async def test_a_message_that_is_too_large_harms_nobody_else() -> None:
    async with link() as to:
        call, other, largest = to.begin("echo"), to.begin("echo"), to.begin("echo")
        await largest.write(bytes(MAX_BYTES))
        assert len(await largest.read()) == MAX_BYTES
        with pytest.raises(asyncio.InvalidStateError):
            await call.write(bytes(MAX_BYTES + 1))
        with pytest.raises(grpc.aio.AioRpcError, match=f"a message of {MAX_BYTES + 1} bytes") as refused:
            await call.read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await other.write(b"still here")
        assert await other.read() == b"still here"


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


async def test_a_service_that_leaves_does_not_keep_new_streams_from_its_successor() -> None:
    """On the same port: a rolling restart in place."""
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
    """A service of an earlier release. Repeated, since requests may be in flight when its refusal arrives."""
    for _ in range(50):
        server = grpc.aio.server()
        Methods().register(server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = MuxChannel(grpc.aio.insecure_channel(f"127.0.0.1:{port}"))
        try:
            echo = channel.stream_stream(f"/{SERVICE}/echo", bytes, _readable)
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


async def test_streams_that_end_before_they_begin_leave_nothing() -> None:
    async with link() as to:
        one = to.begin("echo")
        await one.write(b"here")
        assert await one.read() == b"here"
        for _ in range(5):
            to.begin("wait").cancel()  # nothing of it is sent
            call = to.begin("wait")
            await asyncio.sleep(0)
            call.cancel()
        await one.write(b"end")
        assert await one.read() is grpc.aio.EOF
        async with asyncio.timeout(10):
            await to.pod.stop(grace=60)


async def test_begun_and_ended_in_one_batch() -> None:
    async with link() as to, grpc.aio.insecure_channel(to.pod.address) as channel:
        carry: Any = mux_pb2_grpc.MuxServiceStub(channel).Connect()  # type: ignore[call-arg]
        begin = mux_pb2.Begin(method=f"/{SERVICE}/wait")
        both = [mux_pb2.Frame(stream=1, begin=begin), mux_pb2.Frame(stream=1, end=mux_pb2.End(code=1))]
        await carry.write(mux_pb2.ConnectRequest(frames=both))
        await carry.write(mux_pb2.ConnectRequest(frames=[mux_pb2.Frame(stream=2, begin=begin)]))
        assert (await carry.read()).frames[0].stream == 2
        await carry.write(mux_pb2.ConnectRequest(frames=[mux_pb2.Frame(stream=2, end=mux_pb2.End(code=1))]))
        async with asyncio.timeout(10):
            await to.pod.stop(grace=60)


async def test_a_method_that_says_nothing_of_its_end_is_spoken_for() -> None:
    async with link() as to:
        with pytest.raises(grpc.aio.AioRpcError, match="internal error") as ended:
            await to.begin("vanish").read()
        assert ended.value.code() is grpc.StatusCode.INTERNAL


async def test_who_waits_to_write_hears_of_the_end() -> None:
    async with link() as to:
        call = to.begin("wait")
        for _ in range(8):
            await call.write(bytes(WINDOW // 8))
        writing = asyncio.create_task(call.write(b"too much"))
        await asyncio.sleep(0)
        assert not writing.done()
        call.cancel()
        with pytest.raises(asyncio.InvalidStateError):
            await writing


async def test_who_cancels_reads_nothing_more() -> None:
    """Neither messages received before nor the end are delivered."""
    async with link() as to:
        call, other = to.begin("echo"), to.begin("echo")
        for message in (b"one", b"two", b"end"):
            await call.write(message)
        assert await call.read() == b"one"
        await other.write(b"later")
        assert await other.read() == b"later"
        assert call.closed
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call.read()


async def test_what_a_cancelled_stream_had_to_say_is_forgotten() -> None:
    """A service that does not read receives nothing of cancelled streams."""
    sending = SendQueue()
    for number in (1, 2):
        sending.put(mux_pb2.Frame(stream=number, begin=mux_pb2.Begin()))
        sending.put(mux_pb2.Frame(stream=number, message=b"open"))
    assert sending.drop(1)
    sending.put(mux_pb2.Frame(stream=3, message=b"more"))
    assert not sending.drop(3)
    sending.put(mux_pb2.Frame(stream=1, message=b"again"))
    sending.finish()
    assert await written(sending) == [(2, "begin"), (2, "message"), (1, "message")]


async def written(sending: SendQueue) -> list[tuple[int, str | None]]:
    """Return the frames of a finished queue in write order: stream and kind."""
    found: list[tuple[int, str | None]] = []

    async def write(frames: Sequence[mux_pb2.Frame]) -> None:
        assert frames
        found.extend((frame.stream, frame.WhichOneof("event")) for frame in frames)

    await sending.write(write)
    assert not sending.full
    assert sending._bytes == sending._count == 0
    assert not sending._of
    return found


@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from(["begin", "message", "drop"])), max_size=40))
def test_a_queue_has_what_was_put_and_not_dropped(acts: list[tuple[int, str]]) -> None:
    async def main() -> None:
        sending, expected = SendQueue(), list[tuple[int, str]]()
        for stream, act in acts:
            if act == "drop":
                assert sending.drop(stream) is ((stream, "begin") in expected)
                expected = [each for each in expected if each[0] != stream]
            else:
                event: Any = {"begin": mux_pb2.Begin()} if act == "begin" else {"message": b"x" * stream}
                sending.put(mux_pb2.Frame(stream=stream, **event))
                expected.append((stream, act))
        sending.finish()
        assert await written(sending) == expected

    asyncio.run(main())


async def test_what_a_broken_connection_had_to_send_is_not_kept() -> None:
    """An unavailable pod is retried repeatedly, each time with a whole prompt."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        channel = MuxChannel(grpc.aio.insecure_channel(f"127.0.0.1:{nobody.getsockname()[1]}"))
        connections = list[Any]()
        for _ in range(3):
            call = channel.stream_stream(f"/{SERVICE}/echo", bytes, _readable)()
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
        call = channel.stream_stream(f"/{SERVICE}/echo", bytes, _readable)()
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


_frames = st.one_of(
    st.builds(mux_pb2.Frame, message=st.binary(max_size=8)),
    st.builds(mux_pb2.Frame, credit=st.just(0)),
    st.builds(mux_pb2.Frame, end=st.builds(mux_pb2.End, code=st.integers(0, 99))),
)


@given(st.lists(_frames, max_size=20))
def test_what_arrived_before_the_end_is_read(frames: list[mux_pb2.Frame]) -> None:
    async def main() -> None:
        stream = MuxStream(1, SendQueue())
        for frame in frames:
            stream.receive_frame(frame)
        ends = [index for index, frame in enumerate(frames) if frame.HasField("end")]
        said = frames[: ends[0]] if ends else frames
        for frame in said:
            if frame.HasField("message"):
                assert await stream.receive() == frame.message
        if ends:
            assert await stream.receive() == await stream.receive() == frames[ends[0]].end
            assert stream.closed

    asyncio.run(main())


def test_a_frame_that_says_nothing_is_a_breach() -> None:
    async def main() -> None:
        with pytest.raises(ProtocolError):
            MuxStream(1, SendQueue()).receive_frame(mux_pb2.Frame(stream=1))

    asyncio.run(main())


async def test_a_stream_of_a_connection_that_nobody_reads_waits() -> None:
    """Messages wait for the queue to shrink; the stream's end is delivered meanwhile."""
    sending = SendQueue()
    streams = [MuxStream(number, sending) for number in range(1, 12)]
    message = bytes(WINDOW - OVERHEAD)
    for stream in streams[:5]:
        await stream.send(message)
    assert sending.full
    waiting = [asyncio.create_task(stream.send(message)) for stream in streams[5:7]]
    await asyncio.sleep(0)
    assert not any(task.done() for task in waiting)
    streams[5].end(mux_pb2.End())
    with pytest.raises(asyncio.InvalidStateError):
        await waiting[0]
    written: list[mux_pb2.Frame] = []

    async def write(frames: Sequence[mux_pb2.Frame]) -> None:
        written.extend(frames)

    writing = asyncio.create_task(sending.write(write))
    await waiting[1]
    sending.finish()
    await writing
    assert len(written) == 6


async def frames_to(to: Link, frames: AsyncIterator[list[mux_pb2.Frame]]) -> Any:
    """Open a connection that sends these frames; return its call."""

    async def requests() -> AsyncIterator[mux_pb2.ConnectRequest]:
        async for some in frames:
            yield mux_pb2.ConnectRequest(frames=some)

    stub: Any = mux_pb2_grpc.MuxServiceStub(to.channel._current.channel)
    return stub.Connect(requests())


async def test_a_connection_that_is_asked_and_not_read_ends() -> None:
    """Each frame causes an answer; without a limit, unread ones took hundreds of megabytes."""
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
        await to.answered()  # others are served
        answers = 0
        with contextlib.suppress(grpc.aio.AioRpcError):  # the server's status, or gRPC's own on a late write
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


async def test_what_begins_a_stream_is_short() -> None:
    async with link() as to:
        with pytest.raises(grpc.aio.AioRpcError, match="at most") as refused:
            await to.begin("echo", metadata=(("key", "x" * 10_000),)).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        method = to.channel.stream_stream(f"/{SERVICE}/{'x' * 5000}", bytes, _readable)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await method().read()
        assert len(str(unknown.value.details())) < 200


async def test_a_stream_that_fails_ends_though_that_cannot_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serving.mux.servicer.log", None)
    async with link() as to:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to.begin("vanish", timeout=20.0).read()
        assert ended.value.code() is grpc.StatusCode.INTERNAL


class Refused:
    """A gRPC call that failed to connect, before its reader is informed."""

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
