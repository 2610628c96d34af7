"""One end of a stream that a multiplexed connection carries."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.serving.errors import ProtocolError
from specdec.serving.mux.send_queue import MAX_UNSENT_FRAMES, SendQueue
from specdec.serving.validation import MAX_MESSAGE_BYTES
from specdec.v2 import mux_pb2

WINDOW = 1 << 20
"""Bytes that one end may send beyond what the other has read (the message that exceeds them still goes): a stream that
nobody reads holds up its own sender only."""

OVERHEAD = 64
"""Bytes that each message counts in flow control besides its own."""

MOST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Most bytes of one message: less than gRPC's limit, since a frame adds a little to its message, and a batch to its
frames."""


@dataclass
class Traffic:
    """Bytes of messages that one end of streams has sent and received, without the frames around them."""

    sent: int = 0
    received: int = 0


class TooLargeError(Exception):
    """A message that the connection cannot carry."""


def check_batch(frames: Sequence[mux_pb2.Frame]) -> None:
    """Raise ProtocolError if a batch has more frames than ever wait to be sent: a frame takes longer to handle than the
    two bytes of an empty one take to send, and nothing else runs meanwhile."""
    if len(frames) > MAX_UNSENT_FRAMES:
        raise ProtocolError(f"a batch has {len(frames)} frames, must have at most {MAX_UNSENT_FRAMES}")


class Stream:
    """One end of a stream, which sends and receives serialized messages. `closed`: True once nothing can be sent."""

    def __init__(self, number: int, sending: SendQueue, timeout: float | None = None) -> None:
        """`timeout` is how many seconds the stream may last; the owner enforces it."""
        self.number = number
        self.closed = False
        self._sending = sending
        self._unread = 0  # bytes sent that the other end has not read
        self._room = asyncio.Event()  # set while more may be sent
        self._room.set()
        self._arrived: asyncio.Queue[bytes | mux_pb2.End] = asyncio.Queue()
        self._waiting = 0  # bytes arrived that were not read at this end
        self._untold = 0  # bytes read that the sender does not know of yet
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    async def send(self, message: bytes) -> None:
        """Send a message as soon as there is room for it; InvalidStateError if the stream is closed, TooLargeError."""
        if len(message) > MOST_BYTES:
            raise TooLargeError(f"a message of {len(message)} bytes, must have at most {MOST_BYTES}")
        while not self.closed and (self._unread >= WINDOW or self._sending.full):
            self._room.clear()
            if self._sending.full:
                self._sending.notify_room(self._room)
            await self._room.wait()
        if self.closed:
            raise asyncio.InvalidStateError("the stream is over")
        self._unread += len(message) + OVERHEAD
        self.send_frame(mux_pb2.Frame(message=message))

    async def receive(self) -> bytes | mux_pb2.End:
        """Return the next message or, after the last one, how the stream has ended; then the same end on every call."""
        item = await self._arrived.get()
        if isinstance(item, mux_pb2.End):
            self._arrived.put_nowait(item)
            return item
        self._waiting -= len(item) + OVERHEAD
        self._untold += len(item) + OVERHEAD
        if self._untold >= WINDOW // 4 and not self.closed:
            self.send_frame(mux_pb2.Frame(credit=self._untold))
            self._untold = 0
        return item

    def receive_frame(self, frame: mux_pb2.Frame) -> None:
        """Handle a frame from the other end; ProtocolError if it is not allowed. Frames after an end are ignored."""
        if self.closed:
            return
        match frame.WhichOneof("event"):
            case "message":
                if self._waiting >= WINDOW:
                    raise ProtocolError(f"more was sent while {self._waiting} bytes are unread, {WINDOW} are allowed")
                self._waiting += len(frame.message) + OVERHEAD
                self._arrived.put_nowait(frame.message)
            case "credit":
                if frame.credit > self._unread:
                    raise ProtocolError(f"credit for {frame.credit} bytes, {self._unread} are unread")
                self._unread -= frame.credit
                self._room.set()
            case "end":
                self.end(frame.end)
            case kind:
                raise ProtocolError(f"a frame of kind {kind!r} on an open stream")

    def send_frame(self, frame: mux_pb2.Frame) -> None:
        frame.stream = self.number
        self._sending.put(frame)

    def end(self, end: mux_pb2.End, *, at_once: bool = False) -> None:
        """End the stream: nothing is sent any more. What has arrived can still be read, unless it ends `at_once`."""
        while at_once and not self._arrived.empty():
            self._arrived.get_nowait()
        self.closed = True
        self._room.set()
        self._arrived.put_nowait(end)
