"""Tokens of the prompt with their log-probabilities: each arrives exactly once, despite failures."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.client import AsyncClient, Logprobs, Piece, PromptToken
from tests.client.both import ThreadedClient
from tests.client.fake_server import TEXT, TOKENS, Act, FakeServer

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

A, B = Piece("a", b"a"), Piece("b", b"b")
PROMPT = [
    PromptToken(0, Piece("\0", b"\0"), None),
    PromptToken(97, A, Logprobs(-0.125, {97: -0.125, 98: -0.25}, A, {97: A, 98: B}, rank=3)),
    PromptToken(98, B, Logprobs(-0.25, {97: -0.125, 98: -0.25}, B, {97: A, 98: B}, rank=3)),
]


@pytest.fixture(params=[ThreadedClient, AsyncClient], ids=["sync", "asyncio"])
def client_of(request: pytest.FixtureRequest) -> Any:
    return lambda server: request.param(server.address, timeout=20.0)


async def test_they_come_before_the_text(client_of: Any) -> None:
    async with FakeServer() as server, client_of(server) as client:
        async with client.generate("ab", prompt_logprobs=2) as stream:
            chunks = [chunk async for chunk in stream]
        result = await client.complete("ab", prompt_logprobs=2)
        plain = await client.complete("ab")
    assert chunks[0].prompt == PROMPT
    assert chunks[0].resolved is not None
    assert not chunks[0].tokens
    assert not any(chunk.prompt for chunk in chunks[1:])
    assert [token for chunk in chunks for token in chunk.tokens] == TOKENS
    assert (result.prompt, result.text) == (PROMPT, TEXT)
    assert not plain.prompt


@pytest.mark.parametrize("max_tokens", [None, 0])
async def test_a_broken_stream_repeats_none(client_of: Any, max_tokens: int | None) -> None:
    """The stream breaks twice within the prompt, and once after it."""
    acts = [Act(0, "abort", prompt=4), Act(0, "abort", prompt=7), *([] if max_tokens == 0 else [Act(5, "abort")])]
    async with (
        FakeServer(*acts) as server,
        client_of(server) as client,
        client.generate("abcdefgh", prompt_logprobs=0, max_tokens=max_tokens) as stream,
    ):
        chunks = [chunk async for chunk in stream]
    assert [entry.token for chunk in chunks for entry in chunk.prompt] == [0, *b"abcdefgh"]
    assert [token for chunk in chunks for token in chunk.tokens] == ([] if max_tokens == 0 else TOKENS)
    assert chunks[-1].finish is not None
    asked = [call.request.HasField("prompt_logprobs") for call in server.calls]
    assert asked == [True, True, True] + ([] if max_tokens == 0 else [False])
    assert {call.request.sampling.seed for call in server.calls[1:]} == {chunks[0].seed}
