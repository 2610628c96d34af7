"""One end of a stream that a connection carries."""

from __future__ import annotations

import asyncio

from specdec.serving.errors import ProtocolError
from specdec.serving.mux.send_queue import SendQueue
from specdec.serving.wire import MAX_MESSAGE_BYTES
from specdec.v2 import mux_pb2

WINDOW = 1 << 20
"""Bytes that one end may send beyond what the other has read, but for the message that exceeds it: a stream that nobody
reads holds up its sender and nobody else."""

OVERHEAD = 64
"""Bytes that a message counts besides its own."""

MOST_BYTES = MAX_MESSAGE_BYTES - 1024
"""Of one message: a bundle is a little more than its frames, and a frame than its message."""


class TooLargeError(Exception):
    """A message that the connection cannot carry."""


class Stream:
    """Sends and receives serialized messages. `closed` once nothing can be sent any more."""

    def __init__(self, number: int, sending: SendQueue, timeout: float | None = None) -> None:
        """It may last for `timeout` seconds: who has it sees to that."""
        self.number = number
        self.closed = False
        self._sending = sending
        self._unread = 0  # bytes sent, not read there
        self._room = asyncio.Event()  # to send more
        self._room.set()
        self._arrived: asyncio.Queue[bytes | mux_pb2.End] = asyncio.Queue()
        self._waiting = 0  # bytes arrived, not read here
        self._untold = 0  # bytes read, of which the sender has not heard
        self._deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout

    def time_remaining(self) -> float | None:
        """Seconds."""
        return None if self._deadline is None else self._deadline - asyncio.get_running_loop().time()

    async def send(self, message: bytes) -> None:
        """As soon as there is room for it; InvalidStateError if the stream is closed, TooLargeError."""
        if len(message) > MOST_BYTES:
            raise TooLargeError(f"a message of {len(message)} bytes, at most {MOST_BYTES}")
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
        """The next message, or how the stream has ended: the last thing that is received, however often."""
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
        """What the other end has said; ProtocolError if it may not. Behind an end nothing counts."""
        if self.closed:
            return
        match frame.WhichOneof("event"):
            case "message":
                if self._waiting >= WINDOW:
                    raise ProtocolError(f"{self._waiting} bytes wait to be read, and more came")
                self._waiting += len(frame.message) + OVERHEAD
                self._arrived.put_nowait(frame.message)
            case "credit":
                if frame.credit > self._unread:
                    raise ProtocolError(f"{frame.credit} bytes were read, {self._unread} had been sent")
                self._unread -= frame.credit
                self._room.set()
            case "end":
                self.end(frame.end)
            case kind:
                raise ProtocolError(f"a frame of kind {kind!r} in the midst of a stream")

    def send_frame(self, frame: mux_pb2.Frame) -> None:
        frame.stream = self.number
        self._sending.put(frame)

    def end(self, end: mux_pb2.End, *, at_once: bool = False) -> None:
        """Nothing is sent any more; what has arrived can still be read, unless it is to be over `at_once`."""
        while at_once and not self._arrived.empty():
            self._arrived.get_nowait()
        self.closed = True
        self._room.set()
        self._arrived.put_nowait(end)
