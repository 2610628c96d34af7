"""One end of a stream on a multiplexed connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.serving.errors import ProtocolError
from specdec.serving.mux.send_queue import MAX_UNSENT_FRAMES, SendQueue
from specdec.serving.validation import MAX_MESSAGE_BYTES
from specdec.v2 import mux_pb2

WINDOW = 1 << 20
"""Flow-control window in bytes: how far one end may send ahead of the other's reading. A message that exceeds the rest
of the window is still sent. An unread stream blocks only its own sender."""

OVERHEAD = 64
"""Flow-control overhead in bytes per message."""

MAX_BYTES = MAX_MESSAGE_BYTES - 1024
"""Maximum bytes of one message: below gRPC's limit, so that the frame and batch around it fit."""


@dataclass
class ByteCounters:
    """Bytes of messages, without frames, sent and received at one end."""

    sent: int = 0
    received: int = 0


class TooLargeError(Exception):
    """A message is too large for the connection."""


def check_batch(frames: Sequence[mux_pb2.Frame]) -> None:
    """Raise ProtocolError if a batch has more frames than a queue may hold. An empty frame costs its sender only two
    bytes, but time on the receiver's event loop."""
    if len(frames) > MAX_UNSENT_FRAMES:
        raise ProtocolError(f"a batch has {len(frames)} frames, must have at most {MAX_UNSENT_FRAMES}")


class MuxStream:
    """One end of a stream of serialized messages. `closed`: nothing can be sent any more."""

    def __init__(self, number: int, sending: SendQueue, timeout: float | None = None) -> None:
        """`timeout` is the deadline in seconds from now; the owner enforces it."""
        self.number = number
        self.closed = False
        self._sending = sending
        self._unread = 0  # bytes sent but not read by the other end
        self._room = asyncio.Event()  # set when a waiting sender may try again
        self._room.set()
        self._arrived: asyncio.Queue[bytes | mux_pb2.End] = asyncio.Queue()
        self._waiting = 0  # bytes received but not read here
        self._untold = 0  # bytes read but not yet credited to the sender
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout

    def time_remaining(self) -> float | None:
        """Return the seconds until the deadline; None without one."""
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    async def send(self, message: bytes) -> None:
        """Send a message once there is room; InvalidStateError if the stream is closed, TooLargeError above
        MAX_BYTES."""
        if len(message) > MAX_BYTES:
            raise TooLargeError(f"a message of {len(message)} bytes, must have at most {MAX_BYTES}")
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
        """Return the next message. After the last one, return the stream's end, on every call."""
        item = await self._arrived.get()
        if isinstance(item, mux_pb2.End):
            self._arrived.put_nowait(item)
            return item
        self._waiting -= len(item) + OVERHEAD
        self._untold += len(item) + OVERHEAD
        # Grant credit in quarters of the window: this keeps the sender going and needs few frames.
        if self._untold >= WINDOW // 4 and not self.closed:
            self.send_frame(mux_pb2.Frame(credit=self._untold))
            self._untold = 0
        return item

    def receive_frame(self, frame: mux_pb2.Frame) -> None:
        """Handle a frame from the other end; ProtocolError if it is invalid. Frames after the end are ignored."""
        if self.closed:
            return
        match frame.WhichOneof("event"):
            case "message":
                if self._waiting >= WINDOW:
                    raise ProtocolError(
                        f"a message arrived with {self._waiting} bytes unread, the window is {WINDOW} bytes"
                    )
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

    def end(self, end: mux_pb2.End, *, drop_unread: bool = False) -> None:
        """End the stream: nothing more is sent. Received messages can still be read, unless `drop_unread` is set."""
        while drop_unread and not self._arrived.empty():
            self._arrived.get_nowait()
        self.closed = True
        self._room.set()
        self._arrived.put_nowait(end)
