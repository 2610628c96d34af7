"""Over real sockets, multiplexed streams behave like gRPC streams: order, statuses, deadlines, cancellation and flow
control."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from specdec.serving.errors import OverloadedError, from_rpc
from specdec.serving.mux.stream import MAX_BYTES, OVERHEAD, WINDOW, ByteCounters
from specdec.v2 import mux_pb2, mux_pb2_grpc
from specdec.wire.request_metadata import REQUEST_ID
from tests.serving.mux_link import SERVICE, link, readable
from tests.stack import until


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
        with pytest.raises(grpc.aio.AioRpcError, match=r"no streaming method '/tests\.Methods/nothing'") as unknown:
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
        await call.write(b"unreadable")  # the method cannot read it, and ends
        with pytest.raises(grpc.aio.AioRpcError, match="cannot be parsed"):
            await call.read()
        strict = to.channel.stream_stream(f"/{SERVICE}/wait", bytes, lambda _: readable(b"unreadable"))()
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
    """Neither messages that have already arrived nor the end are delivered."""
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


async def test_what_begins_a_stream_is_short() -> None:
    async with link() as to:
        with pytest.raises(grpc.aio.AioRpcError, match="at most") as refused:
            await to.begin("echo", metadata=(("key", "x" * 10_000),)).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        method = to.channel.stream_stream(f"/{SERVICE}/{'x' * 5000}", bytes, readable)
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await method().read()
        assert len(str(unknown.value.details())) < 200


async def test_a_stream_that_fails_ends_though_that_cannot_be_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specdec.serving.mux.servicer.log", None)
    async with link() as to:
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to.begin("vanish", timeout=20.0).read()
        assert ended.value.code() is grpc.StatusCode.INTERNAL
