"""A server accepts keepalive pings and sends its own. If connections have a maximum age, clients resolve addresses
again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from specdec.serving.process.server import SERVER_OPTIONS

Context = grpc.aio.ServicerContext[bytes, bytes]
Options = list[tuple[str, int]]

SILENT_SECONDS = 8.0
"""Seconds without a message, enough for several pings. By default, gRPC ends a connection after two."""

PINGS = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


METHOD = "/test.Server/Call"


@asynccontextmanager
async def serving(answer: Callable[[bytes, Context], Awaitable[bytes]], options: Options) -> AsyncIterator[str]:
    """Serve a single method, `answer`, with these options; yield the address."""
    server = grpc.aio.server(options=options)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Server", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


async def ended(options: Options) -> grpc.StatusCode:
    """Return the status of a call that is silent for `SILENT_SECONDS`, to a server with these options."""

    async def silent(request: bytes, context: Context) -> bytes:
        await asyncio.sleep(SILENT_SECONDS)
        return request

    async with serving(silent, options) as address, grpc.aio.insecure_channel(address, options=PINGS) as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        return await ask(b"", timeout=60).code()


@pytest.mark.verify
async def test_pings_are_taken_at_the_rate_that_the_option_allows() -> None:
    """Proves the option's name, since gRPC ignores unknown options. The client pings every second."""
    name = "grpc.http2.min_ping_interval_without_data_ms"
    assert dict(SERVER_OPTIONS)[name] == 10_000
    assert await ended([(name, 100)]) is grpc.StatusCode.OK
    assert await ended([]) is grpc.StatusCode.UNAVAILABLE


CALLER = """
import sys, grpc
channel = grpc.insecure_channel(sys.argv[1])
channel.unary_unary(sys.argv[2])(b"")
"""


async def outlived(options: Options, seconds: float) -> bool:
    """Return whether a call is still open `seconds` after its caller got SIGSTOP."""
    begun, ended = asyncio.Event(), asyncio.Event()

    async def silent(request: bytes, context: Context) -> bytes:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        raise AssertionError

    async with serving(silent, options) as address:
        caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, address, METHOD)
        try:
            await asyncio.wait_for(begun.wait(), 60)
            os.kill(caller.pid, signal.SIGSTOP)
            try:
                await asyncio.wait_for(ended.wait(), seconds)
            except TimeoutError:
                return True
            return False
        finally:
            caller.kill()
            await caller.wait()


async def test_a_call_ends_whose_caller_is_frozen() -> None:
    """The caller's kernel still acknowledges data, so TCP notices nothing. The test shortens the times to a second."""
    names = ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.http2.ping_timeout_ms")
    assert [dict(SERVER_OPTIONS)[name] for name in names] == [30_000, 20_000, 20_000]
    unlimited = ("grpc.http2.max_pings_without_data", 0)
    assert unlimited in SERVER_OPTIONS
    quick: Options = [unlimited, *((name, 1_000) for name in names)]
    pinged, unasked = await asyncio.gather(outlived(quick, 30.0), outlived([], 4.0))
    assert (pinged, unasked) == (False, True)


async def test_an_old_connection_takes_no_new_calls_and_ends_none() -> None:
    """Proves the option's name, with a maximum age of 0.2 s."""

    begun: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
    over = asyncio.Event()

    async def peer(request: bytes, context: Context) -> bytes:
        if request:
            begun.set_result(context.peer().encode())
            await over.wait()
        return context.peer().encode()

    options = [("grpc.max_connection_age_ms", 200)]
    async with serving(peer, options) as address, grpc.aio.insecure_channel(address) as channel:
        ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(METHOD)
        long = asyncio.ensure_future(ask(b"long", wait_for_ready=True))
        first = await begun
        async with asyncio.timeout(30):
            while await ask(b"", wait_for_ready=True) == first:
                await asyncio.sleep(0.05)
        over.set()
        assert await long == first
