"""The callee's end of multiplexed connections: serves their streams by the methods of registered services."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import partial
from typing import Any, NoReturn

import grpc
import structlog

from specdec.serving.client_sessions import ClientSessions
from specdec.serving.echo import echo
from specdec.serving.errors import (
    InternalError,
    OverloadedError,
    PeerLostError,
    ProtocolError,
    status_details,
    to_status,
)
from specdec.serving.interceptor import guarded
from specdec.serving.mux.send_queue import MAX_UNSENT_FRAMES, SendQueue
from specdec.serving.mux.stream import ByteCounters, MuxStream, check_batch
from specdec.serving.propagation import bind_metadata
from specdec.v2 import mux_pb2, mux_pb2_grpc

log = structlog.get_logger()

FAREWELL_SECONDS = 5.0
"""Seconds that a caller has, when its connection ends, to read the batch being written and then the status."""

MAX_CONNECTIONS = 1024
"""Maximum number of connections to a service. An orchestrator opens one per worker process."""

MAX_CONNECTIONS_OF_ONE = 256
"""Maximum number of connections of one client, so that it cannot lock out others."""

MAX_STREAMS = 4096
"""Maximum number of concurrent streams on a connection."""

MAX_BEGIN_BYTES = 1 << 13
"""Maximum bytes of a stream's method and metadata together; equals gRPC's limit for headers."""


class MuxServicer(mux_pb2_grpc.MuxServiceServicer):
    """The servicer of connections. Services register their methods with it as with a server."""

    def __init__(self) -> None:
        self.traffic = ByteCounters()
        """Bytes of all streams since the start."""
        self._methods: dict[str, Any] = {}
        self._connections: set[ServerConnection] = set()
        self._clients = ClientSessions(MAX_CONNECTIONS_OF_ONE, "connections")
        self._draining = False

    def add_registered_method_handlers(self, service: str, methods: dict[str, Any]) -> None:
        self._methods |= {f"/{service}/{name}": method for name, method in methods.items() if _streams(method)}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Ignore the handlers: gRPC registers the same methods a second time in its older way."""

    @property
    def has_streams(self) -> bool:
        """True if any registered method is a bidirectional stream."""
        return bool(self._methods)

    async def Connect(  # type: ignore[override]
        self,
        request_iterator: AsyncIterator[mux_pb2.ConnectRequest],
        context: grpc.aio.ServicerContext[mux_pb2.ConnectRequest, mux_pb2.ConnectResponse],
    ) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            raise OverloadedError(f"{len(self._connections)} connections are open, the limit is {MAX_CONNECTIONS}")
        with self._clients.session(context):
            connection = ServerConnection(self._methods, context, self.traffic)
            self._connections.add(connection)
            if self._draining:
                connection.drain()
            try:
                await context.send_initial_metadata(())  # the caller's first batch waits for this
                await connection.serve(request_iterator)
            finally:
                self._connections.remove(connection)

    def drain(self) -> None:
        """Accept no new streams; every connection ends with its last stream."""
        self._draining = True
        for connection in self._connections:
            connection.drain()


def _streams(method: Any) -> bool:
    return bool(method.request_streaming and method.response_streaming)


class ServerConnection:
    """The callee's end of a connection: one gRPC stream and the streams it carries."""

    def __init__(self, methods: dict[str, Any], context: Any, traffic: ByteCounters) -> None:
        self._methods = methods
        self._context = context
        self._traffic = traffic
        self._sending = SendQueue()
        self._served: dict[int, tuple[ServedStream, asyncio.Task[None]]] = {}
        self._draining = False

    def drain(self) -> None:
        """Direct new streams to another connection, and end this one with its last stream."""
        self._draining = True
        self._sending.put(mux_pb2.Frame(end=mux_pb2.End()))
        if not self._served:
            self._sending.finish()

    async def serve(self, requests: AsyncIterator[mux_pb2.ConnectRequest]) -> None:
        """Serve until the connection is drained, or its caller ends it or stops reading; then end its streams."""
        reading = asyncio.create_task(self._read(requests))
        overflowing = asyncio.create_task(self._overflow())
        writing = asyncio.create_task(
            self._sending.write(lambda frames: self._context.write(mux_pb2.ConnectResponse(frames=frames)))
        )
        try:
            done, _ = await asyncio.wait({reading, writing, overflowing}, return_when=asyncio.FIRST_COMPLETED)
            self._sending.abandon()
            await self._end({reading, overflowing})
            await asyncio.wait({writing}, timeout=FAREWELL_SECONDS)  # gRPC cannot send a status during a write
        finally:
            await self._end({reading, overflowing, writing})
        for task in done:
            task.result()

    async def _end(self, tasks: set[asyncio.Task[None]]) -> None:
        """Cancel these tasks and end all streams of the connection."""
        ending = set(tasks)
        for served, running in self._served.values():
            served.end(mux_pb2.End())
            ending.add(running)
        for task in ending:
            task.cancel()
        await asyncio.wait(ending)

    async def _overflow(self) -> None:
        """Raise OverloadedError once the caller has left too much unread."""
        await self._sending.overflowed.wait()
        raise OverloadedError(f"{MAX_UNSENT_FRAMES} frames are unread, the limit is reached")

    async def _read(self, requests: AsyncIterator[mux_pb2.ConnectRequest]) -> None:
        async for request in requests:
            self._receive(request.frames)

    def _receive(self, frames: Sequence[mux_pb2.Frame]) -> None:
        # A method of its own: a local of `_read` would keep a stream, and its text, in memory until the next batch.
        check_batch(frames)
        for frame in frames:
            if frame.HasField("begin"):
                self._open(frame.stream, frame.begin)
            elif frame.stream in self._served:
                served, running = self._served[frame.stream]
                served.receive_frame(frame)
                if served.closed:
                    running.cancel()

    def _open(self, number: int, begin: mux_pb2.Begin) -> None:
        if number in self._served or not number:
            raise ProtocolError(
                f"stream {number} begins twice" if number else "stream 0 is reserved for the connection"
            )
        method = self._methods.get(begin.method)
        served = ServedStream(number, self._sending, begin, method, self._context, self._traffic)
        if self._draining:
            served.send_status(to_status(PeerLostError("the service is shutting down", "DRAINING")))
        elif len(self._served) >= MAX_STREAMS:
            served.send_end(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{MAX_STREAMS} streams are open on this connection, the limit is reached",
            )
        elif (size := begin.ByteSize()) > MAX_BEGIN_BYTES:
            served.send_end(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"method and metadata have {size} bytes, must have at most {MAX_BEGIN_BYTES}",
            )
        elif method is None:
            served.send_end(grpc.StatusCode.UNIMPLEMENTED, f"there is no streaming method {echo(begin.method)} here")
        else:
            running = asyncio.create_task(self._run(served))
            self._served[number] = served, running
            running.add_done_callback(partial(self._on_run_ended, number))  # it may be cancelled before it starts

    async def _run(self, served: ServedStream) -> None:
        """Serve one stream with its method, wrapped as the interceptor wraps calls."""
        bind_metadata(served.begin.metadata)
        try:
            async with asyncio.timeout(served.time_remaining()):
                await guarded(served.method.stream_stream)(served.requests(), served)
            served.send_end(grpc.StatusCode.OK)
        except grpc.aio.AbortError:
            pass  # its status has been sent
        except TimeoutError:
            served.send_end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")

    def _on_run_ended(self, number: int, run: asyncio.Task[None]) -> None:
        served, _ = self._served.pop(number)
        error = None if run.cancelled() else run.exception()
        if not served.closed and not served.ended:  # its method ended without a status
            served.send_status(to_status(InternalError()))
            log.error("stream_failed", method=served.begin.method, exc_info=error)
        if self._draining and not self._served:
            self._sending.finish()


class ServedStream(MuxStream):
    """The callee's end of a stream: the part of `grpc.aio.ServicerContext` that methods use."""

    def __init__(
        self, number: int, sending: SendQueue, begin: mux_pb2.Begin, method: Any, connection: Any, traffic: ByteCounters
    ) -> None:
        """`connection` is the context of the connection's own call; `traffic` counts the stream's messages."""
        super().__init__(number, sending, begin.timeout_us / 1e6 if begin.HasField("timeout_us") else None)
        self.begin = begin
        self.method = method
        self.ended = False  # its end was sent to the caller
        self._connection = connection
        self._traffic = traffic

    async def requests(self) -> AsyncIterator[Any]:
        """Yield the caller's requests until the stream ends."""
        while not isinstance(message := await self.receive(), mux_pb2.End):
            self._traffic.received += len(message)
            yield self.method.request_deserializer(message)

    async def write(self, response: Any) -> None:
        message = self.method.response_serializer(response)
        await self.send(message)
        self._traffic.sent += len(message)

    async def abort_with_status(self, status: grpc.Status) -> NoReturn:
        self.send_status(status)
        raise grpc.aio.AbortError

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> NoReturn:
        self.send_end(code, details)
        raise grpc.aio.AbortError

    def cancelled(self) -> bool:
        """Return True if the caller has ended the stream."""
        return self.closed

    def peer(self) -> str:
        return str(self._connection.peer())

    def auth_context(self) -> Any:
        return self._connection.auth_context()

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return tuple(self.begin.metadata.items())

    def send_status(self, status: grpc.Status) -> None:
        self.send_end(status.code, status.details, status_details(status.trailing_metadata))

    def send_end(self, code: grpc.StatusCode, details: str = "", status: bytes = b"") -> None:
        self.ended = True
        end = mux_pb2.End(code=code.value[0], message=details, status=status)
        self.send_frame(mux_pb2.Frame(end=end))
