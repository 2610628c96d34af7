"""The caller's end: a channel whose streams share one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from specdec.serving.errors import STATUS_DETAILS, ProtocolError
from specdec.serving.mux.send_queue import SendQueue
from specdec.serving.mux.stream import Stream, TooLargeError
from specdec.v2 import mux_pb2, mux_pb2_grpc

CODES = {code.value[0]: code for code in grpc.StatusCode}


class MuxChannel:
    """To one service. As far as generated stubs use one, a `grpc.aio.Channel`: calls with a single request or response
    go by themselves, streams both ways share a connection, which is begun with the first of them and, when it breaks or
    its service leaves, with the next. To a service that knows of no connections, streams go by themselves too."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel
        self._stub: Any = mux_pb2_grpc.MuxServiceStub(channel)
        self._connections: list[MuxConnection] = []  # the last one takes streams, others still carry some
        self._unknown = False  # connections are, there

    def unary_unary(self, *args: Any, **more: Any) -> Any:
        return self._channel.unary_unary(*args, **more)

    def stream_stream(
        self,
        method: str,
        request_serializer: Callable[[Any], bytes],
        response_deserializer: Callable[[bytes], Any],
        **more: Any,
    ) -> Callable[..., Any]:
        alone: Any = self._channel.stream_stream(method, request_serializer, response_deserializer, **more)

        def begin(*, timeout: float | None = None, metadata: Sequence[tuple[str, str]] = ()) -> Any:
            connection = self._whole()
            if connection is None:
                return alone(timeout=timeout, metadata=metadata)
            begun = mux_pb2.Begin(method=method, metadata=dict(metadata))
            return connection.begin(begun, timeout, request_serializer, response_deserializer)

        return begin

    async def close(self) -> None:
        """Its streams end UNAVAILABLE."""
        for connection in self._connections:
            await connection.close()
        await self._channel.close()

    def _whole(self) -> MuxConnection | None:
        """One that takes streams; None if there are none to be had."""
        self._unknown |= any(connection.unknown for connection in self._connections)
        self._connections = [connection for connection in self._connections if not connection.broken]
        if self._unknown:
            return None
        if not self._connections or self._connections[-1].leaving:
            self._connections.append(MuxConnection(self._stub.Connect()))
        return self._connections[-1]


class MuxConnection:
    """One stream of gRPC's, and the calls that it carries."""

    def __init__(self, call: Any) -> None:
        self.broken = False
        self.leaving = False  # takes no streams any more
        self.unknown = False  # what it is, to the other side
        self._call = call
        self._sending = SendQueue()
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count(1)
        self._tasks = tuple(asyncio.create_task(do()) for do in (self._read, self._write, self._end_if_unread))

    def begin(
        self,
        begun: mux_pb2.Begin,
        timeout: float | None,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
    ) -> Call:
        if timeout is not None:
            begun.timeout_us = int(1e6 * max(0.0, timeout))
        call = Call(next(self._numbers), self._sending, timeout, serialize, deserialize, self._calls)
        call.send_frame(mux_pb2.Frame(begin=begun))
        return call

    async def close(self) -> None:
        self._call.cancel()
        await asyncio.wait(self._tasks)

    async def _write(self) -> None:
        """What becomes of a connection is learned by reading it, and a bundle that is on its way while the service says
        that it knows no connections would turn that into an internal error: the first one waits for a service that
        does."""
        try:
            with contextlib.suppress(asyncio.InvalidStateError, grpc.aio.UsageError, grpc.aio.AioRpcError):
                await self._call.initial_metadata()
                await self._sending.write(lambda frames: self._call.write(mux_pb2.ConnectRequest(frames=frames)))
        finally:
            self._call.cancel()

    async def _end_if_unread(self) -> None:
        """A service that leaves so much unread serves nobody."""
        await self._sending.overflowed.wait()
        self._call.cancel()

    async def _read(self) -> None:
        end = mux_pb2.End(code=grpc.StatusCode.UNAVAILABLE.value[0], message="the connection was closed")
        try:
            while (response := await self._call.read()) is not grpc.aio.EOF:
                if response is None:
                    raise ProtocolError("a bundle that cannot be read")
                for frame in response.frames:
                    self.leaving |= not frame.stream
                    call = self._calls.get(frame.stream)
                    if call is not None:
                        call.receive_frame(frame)
            end.message = "the connection has ended"
        except grpc.aio.AioRpcError as error:  # of the connection: no service has said it of a stream
            self.unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
            end.message = error.details() or error.code().name
        except ProtocolError as error:
            end = mux_pb2.End(code=grpc.StatusCode.FAILED_PRECONDITION.value[0], message=f"the connection: {error}")
        finally:
            self.broken = True
            self._call.cancel()
            for task in self._tasks[1:]:
                task.cancel()
            for call in list(self._calls.values()):
                call.end(end)


class Call(Stream):
    """A stream as its caller has it; as far as it is used, a `grpc.aio.StreamStreamCall`."""

    def __init__(
        self,
        number: int,
        sending: SendQueue,
        timeout: float | None,
        serialize: Callable[[Any], bytes],
        deserialize: Callable[[bytes], Any],
        running: dict[int, Call],
    ) -> None:
        """`running` are the connection's calls by number, and this one is among them until it is over."""
        super().__init__(number, sending, timeout)
        self._serialize = serialize
        self._deserialize = deserialize
        self._running = running
        self._cancelled = False  # from here
        self._timer = None
        if timeout is not None:
            self._timer = asyncio.get_running_loop().call_later(max(0.0, timeout), self._late)
        running[number] = self

    async def write(self, request: Any) -> None:
        """InvalidStateError if it is over."""
        try:
            await self.send(self._serialize(request))
        except TooLargeError as error:
            self._abandon(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            raise asyncio.InvalidStateError(str(error)) from error

    async def read(self) -> Any:
        """The next message, None if it cannot be read, EOF after the last; AioRpcError if it has ended otherwise,
        CancelledError if it was cancelled."""
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
        """Whoever reads it hears of nothing else any more."""
        self._cancelled = True
        self._abandon(grpc.StatusCode.CANCELLED, "cancelled by its caller")

    def end(self, end: mux_pb2.End, *, at_once: bool = False) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._running.pop(self.number, None)
        super().end(end, at_once=at_once)

    def _late(self) -> None:
        self._abandon(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")

    def _abandon(self, code: grpc.StatusCode, why: str) -> None:
        end = mux_pb2.End(code=code.value[0], message=why)
        if not self.closed and not self._sending.drop(self.number):
            self.send_frame(mux_pb2.Frame(end=end))
        self.end(end, at_once=True)


def _error_of(end: mux_pb2.End) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(STATUS_DETAILS, end.status)] if end.status else []))
    code = CODES.get(end.code, grpc.StatusCode.UNKNOWN)
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details=end.message)
