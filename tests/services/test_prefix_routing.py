"""Conversations stay at the verifier that has them cached, though any verifier could take each turn."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.pods import prefix_routing
from specdec.decoding.block_hashes import HASHED_TOKENS
from tests.services.conftest import Directories
from tests.stack import Stack, stack

CHATS, TURNS = 12, 3


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pods share one event loop here, which may be busy for longer than a request would wait for a response."""
    monkeypatch.setattr(prefix_routing, "ASK_SECONDS", 5.0)


async def turn(services: Stack, text: list[int], **fields: str) -> int:
    """Request an answer, append it to the text, and return the text's number of cached tokens."""
    answer = await services.generate(text, max_tokens=20, plain=True, ignore_end_token=True, **fields)
    text += answer.tokens
    return answer.finish.usage.cached_tokens


def said(chat: int, number: int) -> list[int]:
    return [1 + (37 * chat + 11 * number + 3 * i) % 200 for i in range(50)]


async def test_chats_stay_with_their_verifiers_which_share_them_evenly(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=3) as services:

        async def chat(number: int) -> None:
            text: list[int] = []
            for each in range(TURNS):
                known = len(text)
                text += said(number, each)
                cached = await turn(services, text)
                assert cached >= (known - 1) // HASHED_TOKENS * HASHED_TOKENS, (number, each)

        await asyncio.gather(*(chat(number) for number in range(CHATS)))
        committed = [pod.loop.stats.committed for pod in services.verifiers]
        assert max(committed) <= 1.3 * sum(committed) / 3


async def test_an_orchestrator_that_was_not_there_before_knows_as_much(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=3) as services:
        text = said(0, 0)
        await turn(services, text)
        services.peers.verifiers.become([])
        services.peers.verifiers.become(pod.address for pod in reversed(services.verifiers))  # another would be first
        assert await turn(services, text) >= HASHED_TOKENS


async def test_tenants_do_not_find_one_anothers_prefixes(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2) as services:
        prompt = said(0, 0) + said(0, 1) + said(0, 2)
        await turn(services, list(prompt), tenant="one")
        assert await turn(services, list(prompt), tenant="other") == 0
        took = [pod.loop.stats.prompt_tokens for pod in services.verifiers]
        assert took == [len(prompt)] * 2  # they alternated, as uncached texts do


async def test_requests_with_other_salts_do_not_either(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2) as services:
        prompt = said(0, 0) + said(0, 1) + said(0, 2)
        texts = []
        for fields in ({"cache_salt": "one"}, {"cache_salt": "other"}, {"cache_salt": "one", "tenant": "t"}, {}):
            texts.append(list(prompt))
            assert await turn(services, texts[-1], **fields) == 0
        assert await turn(services, list(prompt), cache_salt="other") == len(prompt) // HASHED_TOKENS * HASHED_TOKENS
        assert texts == texts[:1] * 4  # and the tokens are the same


async def test_a_chat_goes_on_elsewhere_when_its_verifier_is_gone(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2) as services:
        text = said(0, 0)
        await turn(services, text)
        (has_it,) = (pod for pod in services.verifiers if pod.loop.stats.committed)
        await has_it.stop()
        assert await turn(services, text) == 0
        assert await turn(services, text) >= HASHED_TOKENS
