"""Prefix-aware routing: which verifiers are queried for cached prefixes, and which is preferred."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from orchestrator.pods import prefix_routing
from orchestrator.pods.pods import Pod, Pods
from orchestrator.pods.prefix_routing import KNOWN_SECONDS, LOAD_FACTOR, SPARE_SESSIONS, PrefixAnswers, preferred
from specdec.decoding.block_hashes import HASHED_TOKENS, block_hashes
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc
from tests.orchestrator.servers import addresses
from tests.stack import until

HASHES = block_hashes(range(3 * HASHED_TOKENS + 7), b"a tenant")


class Holding(verifier_pb2_grpc.VerifierServiceServicer):
    """A verifier with `blocks` cached blocks of any text, for one tenant."""

    def __init__(self, blocks: int, sessions: int = 0) -> None:
        self.blocks, self.sessions = blocks, sessions
        self.asked = 0

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        raise NotImplementedError

    async def GetStats(self, request: Any, context: Any) -> verifier_pb2.GetStatsResponse:
        raise NotImplementedError

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        self.asked += 1
        known = min(self.blocks, len(request.block_hashes))
        assert list(request.block_hashes) == HASHES
        capacity = model_pb2.PodCapacity(sessions=self.sessions, room=5)
        return verifier_pb2.FindPrefixResponse(cached_tokens=HASHED_TOKENS * known, capacity=capacity)


class Boasting(Holding):
    """Reports more blocks than the text has."""

    async def FindPrefix(self, request: Any, context: Any) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse(cached_tokens=2**32 - 1)


class Older(Holding):
    """A version without prefix queries."""

    async def FindPrefix(self, request: Any, context: Any) -> verifier_pb2.FindPrefixResponse:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
        raise AssertionError


class Silent(Holding):
    """Never answers."""

    async def FindPrefix(self, request: Any, context: Any) -> verifier_pb2.FindPrefixResponse:
        self.asked += 1
        await asyncio.Event().wait()
        raise AssertionError


@asynccontextmanager
async def asking(*verifiers: Holding) -> AsyncIterator[list[Pod]]:
    async with addresses(verifier_pb2_grpc.add_VerifierServiceServicer_to_server, *verifiers) as found:
        pods = Pods(found, connect=grpc.aio.insecure_channel)
        yield list(pods)
        await pods.close()


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, an answer may take longer than a request would wait for it."""
    monkeypatch.setattr(prefix_routing, "ASK_SECONDS", 5.0)


async def test_every_verifier_says_what_it_has_and_how_full_it_is() -> None:
    async with asking(Holding(2, sessions=4), Holding(0), Boasting(0)) as pods:
        found = await PrefixAnswers().cached_tokens(pods, HASHES)
        assert list(found.values()) == [2 * HASHED_TOKENS, 0, 3 * HASHED_TOKENS]
        assert [pod.load.sessions for pod in pods] == [4, 0, 0]


async def test_who_does_not_answer_has_nothing_and_is_not_waited_for_beyond_the_deadline() -> None:
    async with asking(Holding(3), Silent(3), Older(3)) as pods:
        await asyncio.gather(*(pod.channel.channel_ready() for pod in pods))
        begin = time.monotonic()
        found = await PrefixAnswers().cached_tokens(pods, HASHES, 2.0)
        assert 1.8 < time.monotonic() - begin < 30.0  # Silent never answers
        assert list(found.values()) == [3 * HASHED_TOKENS, 0, 0]


async def test_the_samples_of_a_request_share_an_answer_for_a_while() -> None:
    now, asked = 0.0, [Holding(1), Holding(2)]
    async with asking(*asked) as (one, other):
        answers = PrefixAnswers(lambda: now)
        found = await asyncio.gather(*(answers.cached_tokens([one], HASHES) for _ in range(16)))
        assert found == 16 * [{one: HASHED_TOKENS}]
        assert [verifier.asked for verifier in asked] == [1, 0]
        assert await answers.cached_tokens([one, other], HASHES) == {one: HASHED_TOKENS, other: 2 * HASHED_TOKENS}
        assert [verifier.asked for verifier in asked] == [1, 1]
        now += 2 * KNOWN_SECONDS
        await answers.cached_tokens([one], HASHES)
        assert [verifier.asked for verifier in asked] == [2, 1]


async def test_a_sample_that_ends_while_it_asks_leaves_the_others_to_ask() -> None:
    silent = Silent(3)
    async with asking(silent) as pods:
        answers = PrefixAnswers()
        first = asyncio.ensure_future(answers.cached_tokens(pods, HASHES))
        await until(lambda: silent.asked == 1)
        second = asyncio.ensure_future(answers.cached_tokens(pods, HASHES, 0.05))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == {pods[0]: 0}
        assert silent.asked == 2


async def test_nobody_is_asked_about_a_text_without_a_whole_block() -> None:
    asked = [Holding(3), Holding(3)]
    async with asking(*asked) as pods:
        assert await PrefixAnswers().cached_tokens(pods, []) == {}
    assert not any(verifier.asked for verifier in asked)


async def test_a_pod_that_leaves_while_it_is_asked_has_nothing() -> None:
    silent = Silent(3)
    async with asking(Holding(2), silent) as pods:
        begun = asyncio.ensure_future(PrefixAnswers().cached_tokens(pods, HASHES))
        await until(lambda: silent.asked > 0)
        await pods[1].channel.close()
        assert list((await begun).values()) == [2 * HASHED_TOKENS, 0]
        assert list((await PrefixAnswers().cached_tokens(pods, HASHES)).values()) == [2 * HASHED_TOKENS, 0]


def three(sessions: Sequence[int], rooms: Sequence[int] = (9, 9, 9)) -> list[Pod]:
    pods = [Pod(name, None) for name in "abc"]  # type: ignore[arg-type]
    for pod, number, room in zip(pods, sessions, rooms, strict=True):
        pod.load.report(model_pb2.PodCapacity(sessions=number, room=room))
    return pods


def test_a_small_part_of_a_text_does_not_count() -> None:
    a, b, c = pods = three([0, 0, 0])
    assert preferred({a: 99, b: 100, c: 0}, 200, "", pods) == {b: 100}


@pytest.mark.parametrize("others", [0, 10, 100])
def test_who_is_much_busier_than_others_is_not_preferred(others: int) -> None:
    most = next(
        sessions
        for sessions in range(10 * others + 10)
        if sessions >= LOAD_FACTOR * (1 + sessions + 2 * others) / 3 + SPARE_SESSIONS
    )
    a, *_ = pods = three([most - 1, others, others])
    assert preferred({a: 200}, 200, "", pods) == {a: 200}
    a, *_ = pods = three([most, others, others])
    assert preferred({a: 200}, 200, "", pods) == {}


def test_who_has_no_room_is_not_preferred() -> None:
    a, b, _ = pods = three([3, 3, 3], rooms=[0, 1, 1])
    assert preferred({a: 200, b: 100}, 200, "", pods) == {b: 100}
