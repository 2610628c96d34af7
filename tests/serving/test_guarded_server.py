"""A server with a guard closes a connection that only wastes calls, and leaves those of authorized callers alone."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from specdec.client.endpoint import ROUND_ROBIN
from specdec.serving.callers import guard as guards
from specdec.serving.callers.guard import ConnectionGuard
from specdec.serving.errors import UnauthenticatedError
from specdec.serving.interceptor import CallInterceptor, Metadata
from specdec.serving.process.health import HealthServicer
from specdec.serving.process.server import MAX_STREAMS, OPEN_SERVICES, SERVER_OPTIONS
from tests.hostile.keyless_grpc import ACK, RawConnection
from tests.hostile.raw_bytes import HELLO, PREFACE, SETTINGS, frame

PATIENCE = 30.0
ENOUGH = 2 * int(guards.CONNECTION_BURST)
"""Number of calls that use up a connection's budget."""

SERVICE = "tests.Guarded"
ASK, HOLD = f"/{SERVICE}/Ask", f"/{SERVICE}/Hold"
KEY = (("authorization", "Bearer key"),)


class Guarded:
    """A server that requires a key, and its guard."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.guard = ConnectionGuard(clock=clock)
        self.address = ""
        self.held = 0
        self._changed = asyncio.Event()
        self._release = asyncio.Event()

    @staticmethod
    def check(method: str, metadata: Metadata) -> None:
        if method.startswith(f"/{SERVICE}/") and KEY[0] not in metadata:
            raise UnauthenticatedError("authorization: unknown API key")

    async def ask(self, request: bytes, context: Any) -> bytes:
        return request

    async def hold(self, request: bytes, context: Any) -> bytes:
        self.held += 1
        self._changed.set()
        try:
            await self._release.wait()
        finally:
            self.held -= 1
        return request

    async def until_held(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.held < count:
                self._changed.clear()
                await self._changed.wait()

    def release(self) -> None:
        self._release.set()


@asynccontextmanager
async def guarded(clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Guarded]:
    service = Guarded(clock)
    interceptor = CallInterceptor(gates=[service.check], open_services=OPEN_SERVICES, guard=service.guard)
    server = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
    methods = {
        "Ask": grpc.unary_unary_rpc_method_handler(service.ask, bytes, bytes),
        "Hold": grpc.unary_unary_rpc_method_handler(service.hold, bytes, bytes),
    }
    server.add_registered_method_handlers(SERVICE, methods)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service
    finally:
        service.release()
        await server.stop(None)


@asynccontextmanager
async def caller(address: str, *options: tuple[str, int | str]) -> AsyncIterator[Any]:
    """Yield a channel with its own connections."""
    options = (("grpc.use_local_subchannel_pool", 1), *options)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


def asked(channel: Any, method: str = ASK, metadata: Any = KEY) -> Any:
    call = channel.unary_unary(method, bytes, bytes)
    return call(b"?", metadata=metadata, timeout=PATIENCE, wait_for_ready=True)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("reset", ASK),
        ("whole", ASK),
        ("whole", f"/{SERVICE}/Unknown"),
        ("whole", f"/{health.SERVICE_NAME}/Check"),
    ],
)
async def test_a_connection_that_only_wastes_calls_is_closed(kind: str, path: str) -> None:
    """Meanwhile, callers with a key at the same address are served on old and on new connections."""
    async with guarded() as service, caller(service.address) as old:
        assert await asked(old) == b"?"
        async with RawConnection(service.address) as attacker:

            async def attack() -> None:
                while not attacker.closed.is_set():
                    attacker.send(kind, ENOUGH, path)
                    await asyncio.sleep(0.02)  # more than the server takes

            attacking = asyncio.create_task(attack())
            async with asyncio.timeout(PATIENCE):
                while not attacker.closed.is_set():
                    async with caller(service.address) as new:
                        assert [await asked(new), await asked(old)] == [b"?", b"?"]
            await attacking
            assert await asked(old) == b"?"
    # On a busy machine, the last calls may be noticed after their connection is forgotten, and count as another's.
    assert service.guard.closed_connections >= 1


async def test_resets_by_a_caller_with_a_key_are_closed_too() -> None:
    """The clock stands still, so that it does not matter when a busy machine notices them."""
    async with guarded(clock=lambda: 0.0) as service, RawConnection(service.address) as attacker:
        for _ in range(ENOUGH // MAX_STREAMS):
            attacker.send("reset", MAX_STREAMS, HOLD, key="key")
        await asyncio.wait_for(attacker.closed.wait(), PATIENCE)


async def test_a_connection_with_good_calls_is_left_alone() -> None:
    """A proxy's connection carries calls of good and bad callers."""
    async with guarded() as service, caller(service.address) as proxy:
        held = asked(proxy, HOLD)
        await service.until_held(1)
        for _ in range(ENOUGH):
            with pytest.raises(grpc.aio.AioRpcError, match="unknown API key"):
                await asked(proxy, metadata=())
        assert service.guard.wasted_calls == ENOUGH
        assert service.guard.closed_connections == 0
        service.release()
        assert await held == b"?"


async def test_a_connection_carries_a_bounded_number_of_calls() -> None:
    async with guarded() as service, RawConnection(service.address) as one:
        one.send("whole", 3 * MAX_STREAMS, HOLD, key="key")
        await service.until_held(1)
        async with caller(service.address) as another:
            assert await asked(another) == b"?"
        assert service.held <= MAX_STREAMS


async def test_our_clients_open_connections_for_more_calls() -> None:
    async with guarded() as service, caller(service.address, ROUND_ROBIN) as channel:
        calls = [asyncio.ensure_future(asked(channel, HOLD)) for _ in range(2 * MAX_STREAMS + 1)]
        await service.until_held(len(calls))
        service.release()
        assert await asyncio.gather(*calls) == [b"?"] * len(calls)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("grpc.server_handshake_timeout_ms", b""),
        ("grpc.server_handshake_timeout_ms", PREFACE),
        ("grpc.http2.settings_timeout", HELLO),
        ("grpc.max_connection_idle_ms", HELLO + frame(SETTINGS, ACK, 0)),
    ],
)
async def test_a_connection_that_makes_no_calls_is_closed(limit: str, said: bytes) -> None:
    """gRPC itself closes it, by an option; the test would notice if the option were renamed."""
    options = [(name, 100 if name == limit else value) for name, value in SERVER_OPTIONS]
    assert options != list(SERVER_OPTIONS)
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        with contextlib.suppress(ConnectionError):  # the connection may end with a reset
            await asyncio.wait_for(reader.read(), PATIENCE)
    finally:
        writer.close()
        await server.stop(None)


async def test_a_refusal_is_answered_before_the_request_is_read() -> None:
    async with guarded() as service, caller(service.address) as channel:
        call = channel.stream_unary(ASK)(timeout=PATIENCE)  # the call sends no message
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        unknown = channel.unary_unary(f"/{SERVICE}/Unknown")(b"", timeout=PATIENCE)
        assert await unknown.code() is grpc.StatusCode.UNIMPLEMENTED
