"""Streams stay open while nothing is to be said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import anthropic
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from specdec.openai_api.anthropic_answer import PING
from specdec.openai_api.event_stream import COMMENT, EventStream, typed_event_of
from specdec.openai_api.json_text import Json
from specdec.openai_api.metrics import Counted
from tests.openai_api.test_http_server import serving

GET = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n"


@asynccontextmanager
async def quiet(*events: Json, ping: bytes = COMMENT, **options: Any) -> AsyncIterator[str]:
    """Serve a stream in which each event waits for a ping; yield the address."""
    pinged = asyncio.Event()

    async def given() -> AsyncGenerator[Json, None]:
        for event in events:
            await pinged.wait()
            pinged.clear()
            yield event

    stream = EventStream(given(), ping=ping, quiet_seconds=0.01, **options)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            await send(message)
            if message.get("body") == ping:
                pinged.set()

        await stream(scope, receive, noting)

    async with serving(app) as server, asyncio.timeout(20):
        yield f"127.0.0.1:{server.port}"


async def received(address: str) -> bytes:
    reader, writer = await asyncio.open_connection(*address.split(":"))
    try:
        writer.write(GET)
        return await reader.readuntil(b"[DONE]\n\n")
    finally:
        writer.close()


@pytest.mark.parametrize("ping", [COMMENT, typed_event_of(PING)])
async def test_a_quiet_stream_sends_pings(ping: bytes) -> None:
    async with quiet({"number": 1}, {"number": 2}, ping=ping) as address:
        text = await received(address)
    assert text.index(ping) < text.index(b'{"number":1}') < text.rindex(ping) < text.index(b'{"number":2}')


async def test_an_event_postpones_the_ping() -> None:
    quiet_seconds, loop, pinged = 0.05, asyncio.get_running_loop(), asyncio.Event()
    sent: list[tuple[float, bytes]] = []

    async def events() -> AsyncGenerator[Json, None]:
        end = loop.time() + 2 * quiet_seconds
        while loop.time() < end:
            yield {}
            await asyncio.sleep(0)
        await pinged.wait()

    async def receive() -> Message:
        message: Message = await loop.create_future()
        return message

    async def send(message: Message) -> None:
        sent.append((loop.time(), message.get("body", b"")))
        if message.get("body") == COMMENT:
            pinged.set()

    async with asyncio.timeout(20):
        await EventStream(events(), quiet_seconds=quiet_seconds)({"type": "http", "path": "/"}, receive, send)
    (before, _), (first, _) = next(pair for pair in pairwise(sent) if pair[1][1] == COMMENT)
    assert first - before >= quiet_seconds


async def test_a_ping_is_not_the_first_byte() -> None:
    """Time to first byte counts the answer alone."""
    found = list[float]()

    async def given() -> AsyncGenerator[Json, None]:
        await pinged.wait()
        found.append(first_bytes())
        yield {}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        async def noting(message: Message) -> None:
            await send(message)
            if message.get("body") == COMMENT:
                pinged.set()

        await EventStream(given(), quiet_seconds=0.01)(scope, receive, noting)

    def first_bytes() -> float:
        samples = [sample for metric in counted.metrics() for sample in metric.samples]
        name = "specdec_openai_time_to_first_byte_seconds_count"
        return next(sample.value for sample in samples if sample.name == name)

    pinged, counted = asyncio.Event(), Counted(app, [])
    async with serving(counted) as server, asyncio.timeout(20):
        await received(f"127.0.0.1:{server.port}")
    assert [*found, first_bytes()] == [0, 1]


async def test_the_official_clients_skip_pings() -> None:
    chunk = {"id": "c", "object": "text_completion", "created": 1, "model": "m", "choices": []}
    async with (
        quiet(chunk, chunk) as address,
        openai.AsyncOpenAI(base_url=f"http://{address}", api_key="key") as client,
    ):
        found = await client.completions.create(model="m", prompt="x", stream=True)
        assert [piece.id async for piece in found] == ["c", "c"]
    stop = {"type": "message_stop"}
    async with (
        quiet(stop, stop, encode=typed_event_of, end=b"", ping=typed_event_of(PING)) as address,
        anthropic.AsyncAnthropic(base_url=f"http://{address}", api_key="key") as own,
    ):
        hi: Any = [{"role": "user", "content": "hi"}]
        events = await own.messages.create(model="m", max_tokens=1, messages=hi, stream=True)
        assert [event.type async for event in events] == ["message_stop", "message_stop"]
