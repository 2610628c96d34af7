"""A multiplexed channel to a service with bytes as messages, over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError

from specdec.serving.errors import OverloadedError
from specdec.serving.mux.channel import MuxChannel
from specdec.serving.mux.stream import OVERHEAD, WINDOW
from specdec.serving.process.server import CHANNEL_OPTIONS
from tests.stack import Pod, running

SERVICE = "tests.Methods"


class Methods:
    """A service with bytes as messages."""

    name = SERVICE

    def __init__(self) -> None:
        self.cancelled = 0
        self.written = 0  # messages sent by `flood`
        self.request_ids: list[Any] = []

    def register(self, server: Any) -> None:
        methods = {name: self._method(name) for name in ("echo", "refuse", "wait", "flood", "fail", "vanish")}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        server.add_registered_method_handlers(SERVICE, methods)

    async def close(self) -> None:
        pass

    def _method(self, name: str) -> Any:
        return grpc.stream_stream_rpc_method_handler(getattr(self, name), readable, bytes)

    async def echo(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Echo messages until "end"."""
        async for request in requests:
            if request == b"end":
                return
            await context.write(request)

    async def refuse(self, requests: AsyncIterator[bytes], context: Any) -> None:
        raise OverloadedError("no room", retry_after=2.5)

    async def fail(self, requests: AsyncIterator[bytes], context: Any) -> None:
        raise KeyError("a mistake")

    async def vanish(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Fail without a status."""
        raise grpc.aio.UsageError

    async def wait(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Wait forever."""
        self.request_ids.append(structlog.contextvars.get_contextvars()["request_id"])
        try:
            await context.write(b"here")
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def flood(self, requests: AsyncIterator[bytes], context: Any) -> None:
        while True:
            await context.write(bytes(WINDOW // 8 - OVERHEAD))
            self.written += 1


def readable(message: bytes) -> bytes:
    if message == b"unreadable":
        raise DecodeError
    return message


class Link:
    """A mux channel to `methods` behind a pod's port."""

    def __init__(self, pod: Pod, methods: Methods) -> None:
        self.pod = pod
        self.methods = methods
        self.channel = MuxChannel(grpc.aio.insecure_channel(pod.address, options=CHANNEL_OPTIONS))

    def begin(self, method: str, **options: Any) -> Any:
        return self.channel.stream_stream(f"/{SERVICE}/{method}", bytes, readable)(**options)

    async def answered(self) -> None:
        """Wait until a new stream is served; gRPC leaves old connections and tries new ones on its own schedule."""
        async with asyncio.timeout(60):
            while True:
                call = self.begin("echo")
                try:
                    await call.write(b"new")
                    assert await call.read() == b"new"
                    return
                except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
                    await asyncio.sleep(0.02)


@asynccontextmanager
async def link() -> AsyncIterator[Link]:
    methods = Methods()
    async with running(Pod(methods)) as pod:
        found = Link(pod, methods)
        try:
            yield found
        finally:
            await found.channel.close()
