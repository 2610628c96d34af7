"""The send queue of a connection: frames that wait to be written, and its bounds."""

from __future__ import annotations

import asyncio
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from specdec.v2 import mux_pb2

BATCH_BYTES = 1 << 18
"""Bytes in a batch of frames, about: later frames, of any stream, wait while it is written."""


MAX_UNSENT_BYTES = 4 << 20
"""Bytes of queued frames, about, from which on senders of messages wait until fewer are queued."""

MAX_UNSENT_FRAMES = 1 << 14
"""Most frames that wait to be written. Frames that answer others, an end for example, cannot be held back: if so many
of them are queued, the peer does not read."""


@dataclass(slots=True)
class Waiting:
    """A frame that waits to be written."""

    frame: mux_pb2.Frame | None  # None: it was dropped
    size: int  # bytes


class SendQueue:
    """A queue of frames, in order. Frames that are put while one batch is being written go into the next."""

    def __init__(self) -> None:
        self.overflowed = asyncio.Event()
        """Event that is set once more than MAX_UNSENT_FRAMES frames wait: a peer that reads would leave fewer."""
        self._frames: deque[Waiting] = deque()
        self._of: defaultdict[int, deque[Waiting]] = defaultdict(deque)  # those of a stream that are not dropped
        self._bytes = self._count = 0  # of frames that are not dropped
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
        waiting = Waiting(frame, frame.ByteSize())
        self._frames.append(waiting)
        self._of[frame.stream].append(waiting)
        self._bytes += waiting.size
        self._count += 1
        if self._count > MAX_UNSENT_FRAMES:
            self.overflowed.set()
        self._news.set()

    def drop(self, stream: int) -> bool:
        """Drop the waiting frames of a stream; return True if its `begin` was among them."""
        begun = False
        for waiting in self._of.pop(stream, ()):
            assert waiting.frame is not None
            begun |= waiting.frame.HasField("begin")
            self._bytes -= waiting.size
            self._count -= 1
            waiting.frame = None  # `_batch` passes over it: many streams end at once when a pod is lost
        self._make_room()
        return begun

    def finish(self) -> None:
        """Declare that no more frames follow: `write` returns once all are written."""
        self._finished = True
        self._news.set()

    def abandon(self) -> None:
        """Drop all waiting frames and those put later; only the batch that is being written still goes out."""
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
        """Return the next batch: at least one frame, unless none waits, and with more than one at most BATCH_BYTES
        bytes."""
        frames: list[mux_pb2.Frame] = []
        total = 0
        while self._frames and (not frames or total + self._frames[0].size <= BATCH_BYTES):
            waiting = self._frames.popleft()
            if (frame := waiting.frame) is None:
                continue
            of_stream = self._of[frame.stream]
            of_stream.popleft()
            if not of_stream:
                del self._of[frame.stream]
            frames.append(frame)
            total += waiting.size
        self._bytes -= total
        self._count -= len(frames)
        self._make_room()
        return frames

    def _make_room(self) -> None:
        if self._senders and not self.full:
            for sender in self._senders:
                sender.set()
            self._senders.clear()
