"""Places are given to waiting owners in turn, and a named owner leaves one place to others."""

from __future__ import annotations

import asyncio

import pytest

from specdec.serving.fair_turns import FairTurns


async def taken_in_order(turns: FairTurns, owners: list[str]) -> list[str]:
    """Return the order in which callers get turns, if they arrive in the order of `owners`."""
    order: list[str] = []

    async def take(owner: str) -> None:
        await turns.acquire(owner)
        order.append(owner)
        await asyncio.sleep(0)
        turns.release(owner)

    await asyncio.gather(*map(take, owners))
    return order


async def test_owners_take_turns_whoever_has_more_callers() -> None:
    order = await taken_in_order(FairTurns(1), ["a", "a", "a", "a", "b", "c", "b"])
    assert order == ["a", "a", "b", "c", "a", "b", "a"]


async def test_a_named_owner_leaves_a_place() -> None:
    turns = FairTurns(2, reserve=True)
    await turns.acquire("a")
    second = asyncio.create_task(turns.acquire("a"))
    await asyncio.wait_for(turns.acquire("b"), 60)
    turns.release("b")
    await asyncio.sleep(0)
    assert not second.done()
    turns.release("a")
    await asyncio.wait_for(second, 60)


async def test_callers_without_a_name_have_all_places() -> None:
    turns = FairTurns(2, reserve=True)
    for _ in range(2):
        await asyncio.wait_for(turns.acquire(""), 60)
    assert turns.taken == 2


@pytest.mark.parametrize("granted", [False, True], ids=["while it waits", "just when it gets its place"])
async def test_a_caller_that_leaves_keeps_no_place(granted: bool) -> None:
    turns = FairTurns(1)
    await turns.acquire("a")
    leaving = asyncio.create_task(turns.acquire("b"))
    await asyncio.sleep(0)
    if granted:
        turns.release("a")
    leaving.cancel()
    await asyncio.wait([leaving])
    if not granted:
        turns.release("a")
    assert turns.taken == 0
    await asyncio.wait_for(turns.acquire("c"), 60)
