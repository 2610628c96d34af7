"""Queues the frames that are to be written into a connection, and bounds them."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from specdec.v2 import mux_pb2

BATCH_BYTES = 1 << 18
"""Frames of one bundle, about: the next ones wait while it is written, whoever's they are."""


MAX_UNSENT_BYTES = 4 << 20
"""Bytes of frames that wait to be written, about: the senders of more messages wait until they are fewer."""

MAX_UNSENT_FRAMES = 1 << 14
"""Frames that wait to be written. Those that answer others cannot wait: an end, say. Where so many of them are unread,
nobody reads."""


class SendQueue:
    """Frames in order. What is put while one bundle is being written goes into the next."""

    def __init__(self) -> None:
        self.overflowed = asyncio.Event()
        """Set once more frames wait than a peer that reads would leave waiting."""
        self._frames: deque[tuple[mux_pb2.Frame, int]] = deque()  # each with its bytes
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
        """Forget what waits of a stream; whether its beginning was among that."""
        dropped = [frame for frame, _ in self._frames if frame.stream == stream]
        if dropped:
            self._frames = deque(each for each in self._frames if each[0].stream != stream)
            self._bytes = sum(size for _, size in self._frames)
            self._make_room()
        return any(frame.HasField("begin") for frame in dropped)

    def finish(self) -> None:
        """What was put is the last."""
        self._finished = True
        self._news.set()

    def abandon(self) -> None:
        """Nothing more is written but what is being written, whatever was put, or will be."""
        self._abandoned = True
        self._frames.clear()
        self._bytes = 0
        self._make_room()
        self.finish()

    async def write(self, write: Callable[[Sequence[mux_pb2.Frame]], Awaitable[None]]) -> None:
        """Write bundles until it is finished."""
        while True:
            await self._news.wait()
            if self._frames:
                await write(self._batch())
            elif self._finished:
                return
            else:
                self._news.clear()

    def _batch(self) -> list[mux_pb2.Frame]:
        """At least one frame; of more than that, no more bytes than BUNDLE_BYTES."""
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
