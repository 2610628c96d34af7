"""The send queue of a connection: frames that wait to be written, and its bounds."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from specdec.v2 import mux_pb2

BATCH_BYTES = 1 << 18
"""Bytes in a batch of frames, about: later frames, of any stream, wait while it is written."""


MAX_UNSENT_BYTES = 4 << 20
"""Bytes of queued frames, about, from which on senders of messages wait until fewer are queued."""

MAX_UNSENT_FRAMES = 1 << 14
"""Most frames that wait to be written. Frames that answer others, an end for example, cannot be held back: if so many
of them are queued, the peer does not read."""


class SendQueue:
    """A queue of frames, in order. Frames that are put while one batch is being written go into the next."""

    def __init__(self) -> None:
        self.overflowed = asyncio.Event()
        """Event that is set once more than MAX_UNSENT_FRAMES frames wait: a peer that reads would leave fewer."""
        self._frames: deque[tuple[mux_pb2.Frame, int]] = deque()  # (frame, its size in bytes)
        self._bytes = 0
        self._senders: set[asyncio.Event] = set()  # to be set when there is room for messages again
        self._news = asyncio.Event()
        self._finished = self._abandoned = False

    @property
    def full(self) -> bool:
        """True while messages should wait."""
        return self._bytes >= MAX_UNSENT_BYTES

    def notify_room(self, sender: asyncio.Event) -> None:
        """Set this event as soon as messages need not wait any more."""
        self._senders.add(sender)

    def put(self, frame: mux_pb2.Frame) -> None:
        if self._abandoned:
            return
        size = frame.ByteSize()
        self._frames.append((frame, size))
        self._bytes += size
        if len(self._frames) > MAX_UNSENT_FRAMES:
            self.overflowed.set()
        self._news.set()

    def drop(self, stream: int) -> bool:
        """Drop the waiting frames of a stream; return True if its `begin` was among them."""
        dropped = [frame for frame, _ in self._frames if frame.stream == stream]
        if dropped:
            self._frames = deque(each for each in self._frames if each[0].stream != stream)
            self._bytes = sum(size for _, size in self._frames)
            self._make_room()
        return any(frame.HasField("begin") for frame in dropped)

    def finish(self) -> None:
        """Declare that no more frames follow: `write` returns once all are written."""
        self._finished = True
        self._news.set()

    def abandon(self) -> None:
        """Drop all waiting frames and those put later; only the batch that is being written still goes out."""
        self._abandoned = True
        self._frames.clear()
        self._bytes = 0
        self._make_room()
        self.finish()

    async def write(self, write: Callable[[Sequence[mux_pb2.Frame]], Awaitable[None]]) -> None:
        """Write batches of frames until the queue is finished."""
        while True:
            await self._news.wait()
            if self._frames:
                await write(self._batch())
            elif self._finished:
                return
            else:
                self._news.clear()

    def _batch(self) -> list[mux_pb2.Frame]:
        """Return the next batch: at least one frame, and with more than one at most BATCH_BYTES bytes."""
        frames: list[mux_pb2.Frame] = []
        total = 0
        while self._frames and (not frames or total + self._frames[0][1] <= BATCH_BYTES):
            frame, size = self._frames.popleft()
            frames.append(frame)
            total += size
        self._bytes -= total
        self._make_room()
        return frames

    def _make_room(self) -> None:
        if self._senders and not self.full:
            for sender in self._senders:
                sender.set()
            self._senders.clear()
