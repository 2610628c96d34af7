"""A server does not hang up on a client that asks now and then whether it is still there."""

from __future__ import annotations

import asyncio

import grpc

from specdec.serving.process.server import PATIENCE_OPTIONS

SILENT_SECONDS = 8.0
"""Seconds without a message: several pings, of which gRPC by default takes two before it ends the connection."""

PINGS = (
    ("grpc.keepalive_time_ms", 1_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.http2.max_pings_without_data", 0),
)


async def ended(options: list[tuple[str, int]]) -> grpc.StatusCode:
    """Return how a call ends during which a server with these options says nothing for a while."""

    async def silent(request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        await asyncio.sleep(SILENT_SECONDS)
        return request

    server = grpc.aio.server(options=options)
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(silent)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Silent", {"Call": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=PINGS) as channel:
            ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/test.Silent/Call")
            return await ask(b"", timeout=60).code()
    finally:
        await server.stop(0)


async def test_pings_are_taken_at_the_rate_that_the_option_allows() -> None:
    """The option's name is what this proves, at a rate that takes seconds: gRPC ignores names unknown to it."""
    ((name, milliseconds),) = PATIENCE_OPTIONS
    assert milliseconds == 10_000
    assert await ended([(name, 100)]) is grpc.StatusCode.OK
    assert await ended([]) is grpc.StatusCode.UNAVAILABLE
