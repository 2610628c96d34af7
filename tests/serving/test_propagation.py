"""Request id and trace context propagate through all services, with and without a multiplexed connection; over real
sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import structlog

from specdec.serving.mux.channel import MuxChannel
from specdec.serving.propagation import Metadata, carried, trace_context_of, trace_id_of
from tests.stack import served

TRACE = 16 * "ab"
PARENT = f"00-{TRACE}-{8 * 'cd'}-01"


class Relay:
    """A service that calls the next one, if any, and returns the metadata that the last one would propagate."""

    name = "tests.Relay"

    def __init__(self, ahead: Any = None) -> None:
        self.logged: list[dict[str, Any]] = []
        self._ahead = ahead

    def register(self, server: Any) -> None:
        method = grpc.stream_stream_rpc_method_handler(self.ask, bytes, bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(self.name, {"ask": method}),))
        server.add_registered_method_handlers(self.name, {"ask": method})

    async def close(self) -> None:
        pass

    async def ask(self, requests: AsyncIterator[bytes], context: Any) -> None:
        self.logged.append(structlog.contextvars.get_contextvars())
        if self._ahead is None:
            await context.write(repr(carried()).encode())
        else:
            await context.write(await asked(self._ahead, carried()))


async def asked(channel: Any, metadata: Metadata) -> bytes:
    call = channel.stream_stream(f"/{Relay.name}/ask", bytes, bytes)(metadata=metadata)
    await call.write(b"")
    answer: bytes = await call.read()
    return answer


async def test_it_goes_through_services_with_and_without_a_connection() -> None:
    """Of two requests, the second has no trace context, and inherits none from the first."""
    last = Relay()
    async with served(last) as (address, _):
        channel = MuxChannel(grpc.aio.insecure_channel(address))
        async with served(Relay(channel)) as (front, _), grpc.aio.insecure_channel(front) as client:
            given = (("x-request-id", "abc"), ("traceparent", PARENT), ("tracestate", "x=1"), ("other", "no"))
            assert (await asked(client, given)).decode() == repr(given[:3])
            assert (await asked(client, (("x-request-id", "def"),))).decode() == repr((("x-request-id", "def"),))
        await channel.close()
    assert [(each["request_id"], each.get("trace_id")) for each in last.logged] == [("abc", TRACE), ("def", None)]


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        f"{PARENT}-more",  # version 00 has four fields
        f"ff{PARENT[2:]}",
        PARENT.replace(TRACE, 32 * "0"),
        PARENT.replace(8 * "cd", 16 * "0"),
        f"{PARENT}\n",
        b"00",
        None,
    ],
)
def test_a_malformed_trace_context_is_ignored(parent: object) -> None:
    assert trace_context_of({"traceparent": parent, "tracestate": "x=1"}) == ()


@pytest.mark.parametrize("parent", [PARENT, f"01{PARENT[2:]}", f"01{PARENT[2:]}-more"])
def test_a_sound_one_is_kept_of_later_versions_too(parent: str) -> None:
    assert trace_context_of({"traceparent": parent}) == (("traceparent", parent),)
    assert trace_id_of(trace_context_of({"traceparent": parent})) == TRACE


@pytest.mark.parametrize("state", ["", "x" * 513, "a\n=b", "\N{SNOWMAN}=1", b"a=1"])
def test_an_unsound_state_does_not_cost_the_parent(state: object) -> None:
    assert trace_context_of({"traceparent": PARENT, "tracestate": state}) == (("traceparent", PARENT),)
