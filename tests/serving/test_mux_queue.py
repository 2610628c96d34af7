"""The send queue of a connection, and streams on it without a socket: bundles, limits, dropped frames, backpressure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.serving.errors import ProtocolError
from specdec.serving.mux.send_queue import SendQueue
from specdec.serving.mux.stream import OVERHEAD, WINDOW, MuxStream
from specdec.v2 import mux_pb2
from tests.stack import until


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


async def test_many_small_messages_wait_for_room() -> None:
    """A commit has some 80 bytes: the limit on frames is reached long before the limit on bytes."""
    queue = SendQueue()
    streams = [MuxStream(number, queue) for number in range(1, 257)]

    async def send_all(stream: MuxStream) -> None:
        for _ in range(100):
            await stream.send(bytes(80))
            await asyncio.sleep(0)

    async def write(frames: Sequence[mux_pb2.Frame]) -> None:
        await asyncio.sleep(0)

    sending = [asyncio.create_task(send_all(stream)) for stream in streams]
    await asyncio.wait(sending, timeout=1)
    assert queue.full
    assert not queue.overflowed.is_set()
    writing = asyncio.create_task(queue.write(write))
    await asyncio.wait_for(asyncio.gather(*sending), 30)
    queue.finish()
    await writing
    assert not queue.overflowed.is_set()


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


async def test_what_a_cancelled_stream_had_to_say_is_forgotten() -> None:
    """A service that was not reading does not get the frames of streams that were cancelled meanwhile."""
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
    """Return stream and kind of each frame of a finished queue, in write order."""
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
    """Messages wait for the queue to shrink; meanwhile, the end of a stream is delivered."""
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
