"""Both clients with several servers: calls rotate over them, and leave a server that fails."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2

from specdec.client import Unavailable, retries
from tests.client.calls import BREAK, retry_info, written
from tests.client.fake_server import TEXT, TOKENS, Act, FakeServer, rich

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


async def test_goes_on_at_another_server(connect: Any) -> None:
    script = iter([Act(9, "hold")])  # for the first call, whichever server gets it
    async with FakeServer(script=script) as one, FakeServer(script=script) as other, connect(one, other) as client:
        chunks = []
        async for chunk in client.generate("hi"):
            chunks.append(chunk)
            if len(chunks) == 3:
                await (one if one.calls else other).stop()
    assert written(chunks) == (TEXT, TOKENS)
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_goes_on_at_another_server_a_name_stands_for(connect: Any) -> None:
    """One gRPC target resolves to several addresses."""
    script = iter([Act(9, "hold")])
    async with FakeServer(script=script) as one, FakeServer(script=script) as other:
        name = [f"ipv4:{one.address},{other.address}"]
        async with connect(address=name) as client:
            chunks = []
            async for chunk in client.generate("hi"):
                chunks.append(chunk)
                if len(chunks) == 3:
                    await (one if one.calls else other).stop()
    assert written(chunks) == (TEXT, TOKENS)
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_calls_take_turns(connect: Any) -> None:
    async with FakeServer() as one, FakeServer() as other, connect(one, other) as client:
        for _ in range(4):
            await client.complete("hi")
        for _ in range(4):
            assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert (len(one.calls), len(other.calls)) == (4, 4)


@pytest.mark.usefixtures("unused_proxy")
async def test_servers_are_reached_without_the_proxy_of_the_web(connect: Any) -> None:
    async with FakeServer() as one, FakeServer() as other, connect(one, other) as client:
        for _ in range(2):
            await client.complete("hi")
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_a_server_that_fails_is_left_alone(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_MIN_REST", 60.0)
    always = itertools.repeat(BREAK)
    async with FakeServer(script=always) as bad, FakeServer() as good, connect(bad, good, max_retries=0) as client:
        for _ in range(8):
            assert (await client.complete("hi")).text == TEXT
    assert (len(bad.calls), len(good.calls)) == (1, 8)


async def test_another_server_is_asked_at_once(connect: Any) -> None:
    script = iter([rich(code_pb2.UNAVAILABLE, retry_info(3600))] * 2)  # the first call at each of two servers fails
    async with (
        FakeServer(script=script) as one,
        FakeServer(script=script) as other,
        FakeServer(script=script) as third,
        connect(one, other, third) as client,
    ):
        assert (await client.complete("hi")).text == TEXT
    assert [len(server.calls) for server in (one, other, third)] == [1, 1, 1]


async def test_a_server_that_has_waited_in_vain_is_not_asked_again(connect: Any) -> None:
    """The server has retried verifiers for its whole failover time; client retries would multiply that."""
    lost = rich(code_pb2.UNAVAILABLE, error_details_pb2.ErrorInfo(reason="VERIFIER_LOST", domain="specdec"))
    script = itertools.repeat(lost)
    async with FakeServer(script=script) as one, FakeServer(script=script) as other, connect(one, other) as client:
        with pytest.raises(Unavailable) as caught:
            await client.complete("hi")
    assert caught.value.reason == "VERIFIER_LOST"
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_another_server_may_have_the_model(connect: Any) -> None:
    changed = rich(code_pb2.UNAVAILABLE, error_details_pb2.ErrorInfo(reason="MODEL_CHANGED", domain="specdec"))
    script = iter([Act(9, "abort"), changed, Act()])
    servers = [FakeServer(script=script) for _ in range(3)]
    async with servers[0], servers[1], servers[2], connect(*servers) as client:
        assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert [len(server.calls) for server in servers] == [1, 1, 1]
