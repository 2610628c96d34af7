"""The synchronous baseline: the same tokens, and exactly one draft answer in every step."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from bench.systems.synchronous import TUNING, DraftServicer, RankedFrontier, VerifierServicer
from specdec.decoding.tree import TokenTree
from specdec.v2 import generation_pb2
from tests.services.conftest import Directories
from tests.stack import REMOTE, Stack, stack, until

PROMPT = list(range(40, 70))
TOKENS = 40
SAMPLINGS: list[dict[str, Any]] = [{}, {"temperature": 0.8, "seed": 3}, {"temperature": 1.0, "top_p": 0.9, "seed": 4}]


@asynccontextmanager
async def synchronous(directories: Directories, target_delay: Callable[[], None] | None = None) -> AsyncIterator[Stack]:
    kinds: Any = {"verifier_kind": VerifierServicer, "draft_kind": DraftServicer, "tuning": TUNING}
    async with stack(directories.target, directories.near, target_delay=target_delay, **kinds) as services:
        yield services


def guessing(nodes: int, branches: int) -> dict[str, Any]:
    always = generation_pb2.Speculation(drafters=[REMOTE], forced=True, max_depth=nodes, max_branches=branches)
    return {"speculation": always}


def test_logprobs_of_a_frontier_by_rank() -> None:
    tree, frontier = TokenTree([0], vocabulary=4, last_position=10), RankedFrontier()
    for token, logprob in enumerate((-2.0, -1.0, -3.0)):
        child = tree.add(tree.root, token, logprob)
        assert child is not None
        frontier.add(logprob, child)
    frontier.descend(-0.5, set(tree.root.walk()))
    assert [frontier.logprob_of(place) for place in (1, 2, 3, 4)] == [-0.5, -1.5, -2.5, -math.inf]


@pytest.mark.parametrize(("nodes", "branches"), [pytest.param(1, 1, marks=pytest.mark.verify), (4, 1), (12, 3)])
async def test_tokens_are_those_of_plain_decoding(directories: Directories, nodes: int, branches: int) -> None:
    async with synchronous(directories) as services:
        for sampling in SAMPLINGS:
            common = {"sampling": sampling, "max_tokens": TOKENS, "ignore_end_token": True}
            plain = await services.generate(PROMPT, plain=True, **common)
            drafted = await services.generate(PROMPT, **guessing(nodes, branches), **common)
            assert list(drafted.tokens) == list(plain.tokens)
            assert drafted.finish.speculation.accepted > 0


async def test_no_step_goes_without_an_answer(directories: Directories) -> None:
    """Every step has a chain of 3 unless the text ends sooner. Next to the added delay, rows cost nothing; without it,
    noise could make a row too expensive."""
    async with synchronous(directories, target_delay=partial(time.sleep, 0.05)) as services:
        done = await services.generate(PROMPT, max_tokens=TOKENS, ignore_end_token=True, **guessing(3, 1))
        told = done.finish.speculation
        assert 3 * (told.steps - 3) <= told.offered <= 3 * told.steps
        assert "plain" not in told.sources or told.sources["plain"] <= 1  # the last token leaves no room for candidates


async def test_streams_share_steps(directories: Directories) -> None:
    async with synchronous(directories) as services:
        prompts = [[40 + number, *PROMPT] for number in range(6)]
        common = {"max_tokens": TOKENS, "ignore_end_token": True}
        plain = [await services.generate(prompt, plain=True, **common) for prompt in prompts]
        drafted = await asyncio.gather(
            *(
                services.generate(prompt, **guessing(4, 1 + number % 3), **common)
                for number, prompt in enumerate(prompts)
            )
        )
        assert [list(each.tokens) for each in drafted] == [list(each.tokens) for each in plain]
        await until(lambda: services.draft_slots_used == 0)


async def test_a_draft_that_is_lost_is_not_waited_for(directories: Directories) -> None:
    async with synchronous(directories) as services:
        assert services.draft_server is not None
        await services.draft_server.stop(None)
        done = await services.generate(PROMPT, max_tokens=TOKENS, ignore_end_token=True, **guessing(4, 1))
        assert len(done.tokens) == TOKENS
        assert done.finish.speculation.undrafted_reason
