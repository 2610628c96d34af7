"""Long bodies are parsed in threads, which callers share fairly."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest
from starlette.requests import Request
from starlette.types import Message

from specdec.openai_api.bodies import Bodies
from specdec.openai_api.gateway import Caller
from specdec.openai_api.parsing import LONG_BODY, MAX_LONG_WAITING, SHORT_BODY, Intake, Parser
from specdec.serving.errors import OverloadedError, TenantLimitError
from tests.client.fake_server import FakeServer
from tests.openai_api.front import front
from tests.openai_api.test_http_server import post, told
from tests.stack import until


class Parses:
    """A parse that records its thread, and continues when `go_on` is set."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.go_on = threading.Event()

    def __call__(self) -> str:
        self.threads.append(threading.current_thread())
        assert self.go_on.wait(30)
        return "m"


@pytest.mark.parametrize(("size", "here"), [(SHORT_BODY, True), (SHORT_BODY + 1, False), (LONG_BODY, False)])
async def test_only_short_bodies_are_parsed_on_the_event_loop(size: int, here: bool) -> None:
    parses = Parses()
    parses.go_on.set()
    assert await Parser().parse(size, parses, "a") == "m"
    assert (parses.threads == [threading.current_thread()]) is here


@pytest.mark.parametrize(
    ("body", "here"),
    [(b'{"model": "m"}', True), (b'{"items": {"uniqueItems": true}}', False), (rb'{"unique\u0049tems": true}', False)],
)
async def test_schemas_that_are_slow_to_rewrite_are_not_parsed_on_the_event_loop(body: bytes, here: bool) -> None:
    parses = Parses()
    parses.go_on.set()
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> Message:
        return next(messages)

    intake = Intake(Parser(), Bodies(1.0), lambda _: (Caller("r"), "a"))
    taken = await intake.take(Request({"type": "http", "headers": []}, receive), lambda _, strict: parses())
    assert (parses.threads == [threading.current_thread()]) is here
    assert (taken.size <= SHORT_BODY) is here  # later parts of the request, too


async def test_a_caller_takes_half_of_the_places_at_most() -> None:
    """Other callers get the rest, and a shorter body does not wait behind long ones."""
    parses = Parses()
    parser = Parser()
    first = asyncio.ensure_future(parser.parse(LONG_BODY, parses, "a"))
    await until(lambda: len(parses.threads) == 1)
    running = [
        asyncio.ensure_future(parser.parse(LONG_BODY, parses, caller))
        for caller in ["a"] * (MAX_LONG_WAITING // 2) + ["b"] * (MAX_LONG_WAITING // 2)
    ]
    await asyncio.sleep(0)  # all are waiting
    with pytest.raises(OverloadedError):
        await parser.parse(LONG_BODY, parses, "c")
    running.pop().cancel()
    await asyncio.sleep(0)
    with pytest.raises(TenantLimitError):
        await parser.parse(LONG_BODY, parses, "a")
    shorter = asyncio.ensure_future(parser.parse(LONG_BODY - 1, parses, "a"))
    await until(lambda: len(parses.threads) == 2)
    parses.go_on.set()
    assert set(await asyncio.gather(first, shorter, *running)) == {"m"}


async def test_a_body_of_many_messages_is_refused_before_they_are_built() -> None:
    messages = [{"role": "user", "content": ""}] * 10_000
    body = json.dumps({"model": "fake", "messages": messages}).encode()
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        request = post(body, headers=b"connection: close\r\n").replace(b"/v1/completions", b"/v1/chat/completions")
        answer = await told(http.address, request)
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"has 10000 messages, must have at most 4096" in answer
