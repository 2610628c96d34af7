"""The caller's end of multiplexed connections: a channel whose streams share one gRPC stream."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specdec.serving.errors import STATUS_DETAILS, ProtocolError, status_details
from specdec.serving.mux.send_queue import SendQueue
from specdec.serving.mux.stream import OVERHEAD, WINDOW, MuxStream, TooLargeError, check_batch
from specdec.v2 import mux_pb2, mux_pb2_grpc

CODES = {code.value[0]: code for code in grpc.StatusCode}

PLAIN_SECONDS = 60.0
"""Seconds before a connection is tried again with a service that did not support them: another service may have taken
its address, and plain streams count against the limit of streams on a gRPC connection."""


class MuxChannel:
    """A channel to one service: the part of `grpc.aio.Channel` that generated stubs use.

    Calls with a single request or response are plain gRPC calls. Bidirectional streams share a connection, which the
    first of them opens; after it breaks or its service shuts down, the next stream opens another. If a service does not
    support connections, streams are plain gRPC calls for PLAIN_SECONDS.

    `renewed` returns a new channel when the current one should be replaced, as after a change of certificates;
    otherwise None. Running calls stay on the old channel.
    """

    def __init__(
        self, channel: grpc.aio.Channel, renewed: Callable[[], grpc.aio.Channel | None] = lambda: None
    ) -> None:
        self._current = Carrier(channel)
        self._renewed = renewed
        self._retired: list[Carrier] = []  # not used for new calls
        self._closing: set[asyncio.Task[None]] = set()

    def unary_unary(self, *args: Any, **more: Any) -> Any:
        self._renew()
        return self._current.channel.unary_unary(*args, **more)

    def unary_stream(self, *args: Any, **more: Any) -> Any:
        self._renew()
        return self._current.channel.unary_stream(*args, **more)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **more: Any,
    ) -> Callable[..., Any]:
        self._renew()
        carrier = self._current
        alone: Any = carrier.channel.stream_stream(method, request_serializer, response_deserializer, **more)

        def begin(*, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = ()) -> Any:
            connection = carrier.whole()
            if connection is None:
                carrier.plain = True
                return alone(timeout=timeout, metadata=metadata)
            begun = mux_pb2.Begin(method=method, metadata=dict(metadata))
            return connection.begin(begun, timeout, request_serializer, response_deserializer)

        return begin

    async def close(self) -> None:
        """Close the channel; its streams end with UNAVAILABLE."""
        for carrier in (*self._retired, self._current):
            await carrier.close()

    def _renew(self) -> None:
        """Switch to a new channel, if there is one. The old one's connections end with their last stream. A later
        renewal closes the old channel; its calls with a single request or response, which last seconds, have ended by
        then. A channel that may carry plain streams stays open."""
        if (channel := self._renewed()) is None:
            return
        idle = [carrier for carrier in self._retired if not carrier.plain and not carrier.connections]
        for carrier in idle:
            self._closing.add(closing := asyncio.create_task(carrier.channel.close(None)))
            closing.add_done_callback(self._closing.discard)
        self._retired = [carrier for carrier in self._retired if carrier not in idle]
        self._retired.append(self._current)
        self._current.leave()
        self._current = Carrier(channel)


class Carrier:
    """A gRPC channel and its connections: new streams use the last connection, the others carry older streams."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.plain = False  # has carried plain streams
        self._connections: list[ClientConnection] = []
        self._plain_until = 0.0  # by `time.monotonic`: the service does not support connections

    @property
    def connections(self) -> Sequence[ClientConnection]:
        """The unbroken connections. Broken ones are dropped, to free their unsent data."""
        if any(connection.unknown for connection in self._connections):
            self._plain_until = time.monotonic() + PLAIN_SECONDS
        self._connections = [connection for connection in self._connections if not connection.broken]
        return self._connections

    def whole(self) -> ClientConnection | None:
        """Return a connection for new streams; None for PLAIN_SECONDS after the service did not support connections."""
        connections = self.connections
        if time.monotonic() < self._plain_until:
            return None
        if not connections or connections[-1].leaving:
            stub: Any = mux_pb2_grpc.MuxServiceStub(self.channel)
            self._connections.append(ClientConnection(stub.Connect()))
        return self._connections[-1]

    def leave(self) -> None:
        """Let all connections end with their last streams."""
        for connection in self.connections:
            connection.leave()

    async def close(self) -> None:
        for connection in self.connections:
            await connection.close()
        await self.channel.close()


MAX_STRAY = WINDOW // OVERHEAD + 16
"""Maximum frames of a stream that may arrive after its end: a window of empty messages, and its other frames."""


class ClientConnection:
    """The caller's end of a connection: one gRPC stream and the calls it carries."""

    def __init__(self, call: Any) -> None:
        self.broken = False
        self.accepted = False  # the service has answered
        self.leaving = False  # accepts no new streams, and ends with its last one
        self.unknown = False  # the service does not support connections
        self._call = call
        self._sending = SendQueue()
        self._calls: dict[int, MuxCall] = {}
        self._last = 0  # number of the last stream
        self._stray = 0  # number of frames of ended streams that may still come
        self._tasks = tuple(asyncio.create_task(do()) for do in (self._read, self._write, self._end_if_unread))

    def begin(
        self,
        begun: mux_pb2.Begin,
        timeout: float | None,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> MuxCall:
        if timeout is not None:
            begun.timeout_us = int(1e6 * max(0.0, timeout))
        number = self._last = self._last + 1
        call = MuxCall(number, self, self._sending, timeout, serialize, deserialize)
        self._calls[number] = call
        call.send_frame(mux_pb2.Frame(begin=begun))
        return call

    def leave(self) -> None:
        """Accept no new streams, and end with the last one."""
        self.leaving = True
        self._end_if_idle()

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait(self._tasks)

    def ended(self, call: MuxCall) -> None:
        """Forget a call that has ended; called at least once."""
        if self._calls.pop(call.number, None) is not None:
            self._stray += MAX_STRAY
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self.leaving and not self._calls:
            self._call.cancel()

    async def _write(self) -> None:
        """Write batches of frames once the service has accepted the connection.

        The first batch waits for the initial metadata. If sent earlier to a service without support for connections, it
        would turn the service's answer into an internal error. Only `_read` handles the end of a connection.
        """
        try:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError):
                await self._call.initial_metadata()
                self.accepted = not self._call.done()  # gRPC returns empty metadata for a failed connect
                await self._sending.write(lambda frames: self._call.write(mux_pb2.ConnectRequest(frames=frames)))
        finally:
            self._call.cancel()

    async def _end_if_unread(self) -> None:
        """End the connection once too much is unread: the service has stopped reading."""
        await self._sending.overflowed.wait()
        self._call.cancel()

    async def _read(self) -> None:
        end = mux_pb2.End(code=grpc.StatusCode.UNAVAILABLE.value[0], message="the connection was closed")
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if response is None:
                    raise ProtocolError("a batch of frames cannot be parsed")
                check_batch(response.frames)
                for frame in response.frames:
                    if not frame.stream:
                        self.leave()
                    elif (call := self._calls.get(frame.stream)) is not None:
                        call.receive_frame(frame)
                    elif frame.stream > self._last:
                        raise ProtocolError(f"a frame of stream {frame.stream}, which has not begun")
                    else:
                        self._stray -= 1
                        if self._stray < 0:
                            raise ProtocolError("too many frames of streams that have ended")
            end.message = "the connection has ended"
        except grpc.aio.AioRpcError as error:  # the connection's own error, not a stream's
            self.unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
            end.message = error.details() or error.code().name
            end.status = status_details(error.trailing_metadata())
        except ProtocolError as error:
            end = mux_pb2.End(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], message=f"the connection: {error}")
        finally:
            self.broken = True
            self._sending.abandon()
            self._call.cancel()
            for task in self._tasks[1:]:
                task.cancel()
            for call in list(self._calls.values()):
                call.end(end)


class MuxCall(MuxStream):
    """The caller's end of a stream: the part of `grpc.aio.StreamStreamCall` in use."""

    def __init__(
        self,
        number: int,
        connection: ClientConnection,
        sending: SendQueue,
        timeout: float | None,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> None:
        super().__init__(number, sending, timeout)
        self._connection = connection
        self._serialize = serialize
        self._deserialize = deserialize
        self._cancelled = False  # by `cancel`, locally
        self._timer = None
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout), self._late)

    @property
    def reached(self) -> bool:
        """True if its connection was established, even if it broke later."""
        return self._connection.accepted

    async def write(self, request: Any) -> None:
        """Send a request; InvalidStateError if the stream has ended."""
        try:
            await self.send(self._serialize(request))
        except TooLargeError as error:
            self._abandon(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise asyncio.InvalidStateError(str(error)) from error

    async def read(self) -> Any:
        """Return the next message, None if it cannot be parsed, EOF after the last one. Raise CancelledError if the
        call was cancelled, AioRpcError if it ended with a status other than OK."""
        item = await self.receive()
        if not isinstance(item, mux_pb2.End):
            with contextlib.suppress(DecodeError):
                return self._deserialize(item)
            return None
        if self._cancelled:
            raise asyncio.CancelledError
        if item.code == grpc.StatusCode.OK.value[0]:
            return grpc.aio.EOF
        raise _error_of(item)

    def cancel(self) -> None:
        """Cancel the call: received messages are dropped, and `read` raises CancelledError from now on."""
        self._cancelled = True
        self._abandon(grpc.StatusCode.CANCELLED, "cancelled by its caller")

    def end(self, end: mux_pb2.End, *, drop_unread: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().end(end, drop_unread=drop_unread)
        self._connection.ended(self)

    def _late(self) -> None:
        self._abandon(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")

    def _abandon(self, code: grpc.StatusCode, why: str) -> None:
        end = mux_pb2.End(code=code.value[0], message=why)
        # If `begin` was still queued, the service does not know the stream and needs no end.
        if not self.closed and not self._sending.drop(self.number):
            self.send_frame(mux_pb2.Frame(end=end))
        self.end(end, drop_unread=True)


def _error_of(end: mux_pb2.End) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(STATUS_DETAILS, end.status)] if end.status else []))
    code = CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=end.message)
