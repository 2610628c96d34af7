"""Streams stay open while nothing is to be said."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import openai
import pytest
from starlette.types import Message, Receive, Scope, Send

from specdec.openai_api.anthropic_answer import PING
from specdec.openai_api.event_stream import COMMENT, EventStream, typed_event_of
from specdec.openai_api.json_text import Json
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


async def test_a_stream_with_events_sends_no_pings() -> None:
    async def events() -> AsyncGenerator[Json, None]:
        for number in range(100):
            yield {"number": number}

    async with serving(EventStream(events(), quiet_seconds=3600.0)) as server, asyncio.timeout(20):
        assert COMMENT not in await received(f"127.0.0.1:{server.port}")


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
