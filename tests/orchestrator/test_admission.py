"""A few at a time, and after a refusal nobody for a moment."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.admission import AT_ONCE, MOMENT, Admission
from specdec.serving.errors import OverloadedError, PeerLostError


async def test_a_few_at_a_time() -> None:
    door = Admission()
    inside = most = 0
    full, go = asyncio.Event(), asyncio.Event()

    async def enter() -> None:
        nonlocal inside, most
        async with door.opening():
            inside += 1
            most = max(most, inside)
            if inside == AT_ONCE:
                full.set()
            await go.wait()
            inside -= 1

    entering = [asyncio.create_task(enter()) for _ in range(3 * AT_ONCE)]
    await full.wait()
    go.set()
    await asyncio.gather(*entering)
    assert most == AT_ONCE


async def test_a_refusal_stands_for_those_who_wait() -> None:
    door = Admission()
    asked = 0
    go = asyncio.Event()

    async def enter() -> None:
        nonlocal asked
        async with door.opening():
            asked += 1
            await go.wait()
            raise OverloadedError("full", retry_after=2.5)

    entering = [asyncio.create_task(enter()) for _ in range(3 * AT_ONCE)]
    await asyncio.sleep(0)
    go.set()
    results = await asyncio.gather(*entering, return_exceptions=True)
    assert asked == AT_ONCE
    assert [(type(r), str(r), getattr(r, "retry_after", None)) for r in results] == (
        [(OverloadedError, "full", 2.5)] * len(results)
    )


async def test_it_stands_for_a_moment_only() -> None:
    now = 100.0
    door = Admission(clock=lambda: now)
    with pytest.raises(OverloadedError):
        async with door.opening():
            raise OverloadedError("full")
    now += 0.9 * MOMENT
    with pytest.raises(OverloadedError):
        async with door.opening():
            pytest.fail("nobody is to ask now")
    now += 0.2 * MOMENT
    async with door.opening():
        pass


async def test_other_errors_shut_nobody_out() -> None:
    door = Admission()
    with pytest.raises(PeerLostError):
        async with door.opening():
            raise PeerLostError("gone", "VERIFIER_LOST")
    async with door.opening():
        pass
