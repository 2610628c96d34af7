"""The bounded send queue of a connection: frames waiting to be written."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specdec.v2 import mux_pb2

BATCH_BYTES = 1 << 18
"""Approximate bytes in a batch of frames. Later frames, of any stream, wait while it is written."""


MAX_UNSENT_BYTES = 4 << 20
"""Approximate bytes of queued frames above which senders of messages wait."""

MAX_UNSENT_FRAMES = 1 << 14
"""Number of queued frames above which the connection is ended. Messages wait for room, but other frames, such as an
end, do not. So only a peer that has stopped reading fills the queue."""


@dataclass(slots=True)
class QueuedFrame:
    """A frame waiting to be written."""

    frame: mux_pb2.Frame | None  # None: dropped
    size: int  # bytes


class SendQueue:
    """A FIFO queue of frames. Frames added while a batch is being written go into the next one."""

    def __init__(self) -> None:
        self.overflowed = asyncio.Event()
        """Set when more than MAX_UNSENT_FRAMES frames are queued: the peer has stopped reading."""
        self._frames: deque[QueuedFrame] = deque()
        self._of: defaultdict[int, deque[QueuedFrame]] = defaultdict(deque)  # live frames by stream
        self._bytes = self._count = 0  # of live frames
        self._senders: set[asyncio.Event] = set()  # set when there is room for messages again
        self._news = asyncio.Event()
        self._finished = self._abandoned = False

    @property
    def full(self) -> bool:
        """True while senders of messages should wait."""
        return self._bytes >= MAX_UNSENT_BYTES or self._count >= MAX_UNSENT_FRAMES // 2

    def notify_room(self, sender: asyncio.Event) -> None:
        """Set this event as soon as there is room for messages."""
        self._senders.add(sender)

    def put(self, frame: mux_pb2.Frame) -> None:
        if self._abandoned:
            return
        queued = QueuedFrame(frame, frame.ByteSize())
        self._frames.append(queued)
        self._of[frame.stream].append(queued)
        self._bytes += queued.size
        self._count += 1
        if self._count > MAX_UNSENT_FRAMES:
            self.overflowed.set()
        self._news.set()

    def drop(self, stream: int) -> bool:
        """Drop the queued frames of a stream; return whether its `begin` was among them."""
        begun = False
        for queued in self._of.pop(stream, ()):
            assert queued.frame is not None
            begun |= queued.frame.HasField("begin")
            self._bytes -= queued.size
            self._count -= 1
            queued.frame = None  # `_batch` skips it; removing it here would be slow when a lost pod ends many streams
        self._make_room()
        return begun

    def finish(self) -> None:
        """Mark the queue as complete: `write` returns once all frames are written."""
        self._finished = True
        self._news.set()

    def abandon(self) -> None:
        """Drop all queued and later frames; only the batch being written is still sent."""
        self._abandoned = True
        self._frames.clear()
        self._of.clear()
        self._bytes = self._count = 0
        self._make_room()
        self.finish()

    async def write(self, write: Callable[[Sequence[mux_pb2.Frame]], Awaitable[None]]) -> None:
        """Write batches of frames until the queue is finished."""
        while True:
            await self._news.wait()
            if frames := self._batch():
                await write(frames)
            elif self._finished:
                return
            else:
                self._news.clear()

    def _batch(self) -> list[mux_pb2.Frame]:
        """Return the next batch: at most BATCH_BYTES, except for a single larger frame; empty if none is queued."""
        frames: list[mux_pb2.Frame] = []
        total = 0
        while self._frames and (not frames or total + self._frames[0].size <= BATCH_BYTES):
            queued = self._frames.popleft()
            if (frame := queued.frame) is None:
                continue
            of_stream = self._of[frame.stream]
            of_stream.popleft()
            if not of_stream:
                del self._of[frame.stream]
            frames.append(frame)
            total += queued.size
        self._bytes -= total
        self._count -= len(frames)
        self._make_room()
        return frames

    def _make_room(self) -> None:
        if self._senders and not self.full:
            for sender in self._senders:
                sender.set()
            self._senders.clear()
