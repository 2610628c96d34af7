"""Verifiers that stay connected and do not serve, or answer wrongly: the text continues at another one."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from specdec.v2 import verifier_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import (
    CONTRASTIVE,
    PROMPT,
    WARM,
    Frozen,
    Gates,
    Reader,
    changes,
    same,
    service_of,
    serving,
    slow_target,
    undisturbed,
)
from tests.stack import stack, until


@pytest.fixture(scope="module")
def gates() -> Gates:
    """Shared by all tests: the step latency is measured for each delay of an engine."""
    return Gates()


async def test_a_frozen_verifier_is_left(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(
        directories.target,
        directories.near,
        verifiers=2,
        target_delay=slow_target,
        verifier_kind=Frozen,
        silence_seconds=0.75,
    ) as services:
        reader = Reader(services, **fields)
        await reader.read(20)
        frozen = service_of(services, serving(services))
        frozen.thawed.clear()
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        assert reader.longest_pause < 9  # 1 s on an idle machine
        frozen.thawed.set()
        await until(lambda: services.idle)


async def test_a_frozen_verifier_is_not_waited_for_at_the_beginning(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2, verifier_kind=Frozen, silence_seconds=0.6) as services:
        service_of(services, 0).thawed.clear()
        answers = await asyncio.gather(*(services.generate(PROMPT, max_tokens=10) for _ in range(8)))
        assert [len(a.tokens) for a in answers] == 8 * [10]
        service_of(services, 0).thawed.set()


async def test_a_verifier_that_answers_and_does_not_step_is_left(directories: Directories, gates: Gates) -> None:
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)
    async with stack(
        directories.target, directories.near, verifiers=2, target_delay=gates, stuck_seconds=1.0
    ) as services:
        reader = Reader(services, **fields)
        await reader.read(10)
        with gates.of(services.verifiers[serving(services)]).closed():
            got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}
        await until(lambda: services.idle)


async def test_a_verifier_that_is_alone_may_take_long_over_a_step(directories: Directories, gates: Gates) -> None:
    async with stack(directories.target, directories.near, target_delay=gates, stuck_seconds=0.5) as services:
        reader = Reader(services, max_tokens=60, ignore_end_token=True)
        await reader.read(10)
        with gates.of(services.verifiers[0]).closed():
            await asyncio.sleep(1.5)  # longer than the time limit where there is another pod
        got = await reader.rest()
        assert "verifier_lost" not in got.finish.speculation.failover_events


async def test_a_commit_out_of_place_is_not_taken(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 80, "ignore_end_token": True, "sampling": WARM}
    want = await undisturbed(directories, **fields)

    def shifted(response: verifier_pb2.VerifyResponse) -> verifier_pb2.VerifyResponse:
        if response.commit.committed.tokens:
            response.commit.committed.base += 1
        return response

    async with stack(
        directories.target, directories.near, verifiers=2, target_delay=slow_target, verifier_kind=Frozen
    ) as services:
        reader = Reader(services, **fields)
        await reader.read(10)
        service_of(services, serving(services)).changed = shifted
        got = await reader.rest()
        same(directories, want, got, WARM)
        assert changes(got.finish.speculation) == {"verifier_lost": 1}


async def test_nobody_leaves_a_verifier_that_has_nothing_to_do_for_it(directories: Directories) -> None:
    """The verifier waits for a slow draft, and shows that by reporting no step in progress."""
    async with stack(
        directories.target, directories.near, delay=lambda: time.sleep(0.7), silence_seconds=0.5
    ) as services:
        got = await services.generate(PROMPT, max_tokens=2, ignore_end_token=True, rule=CONTRASTIVE)
        assert len(got.tokens) == 2
        assert not got.finish.speculation.failover_events
