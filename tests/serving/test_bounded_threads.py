"""Bounded thread pools limit the number of waiting callers, half of it for each owner, and a caller's waiting time."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from specdec.serving.bounded_threads import BoundedThreads
from specdec.serving.errors import OverloadedError, TenantLimitError
from tests.stack import until


@asynccontextmanager
async def busy(limit: int) -> AsyncIterator[tuple[BoundedThreads, threading.Event]]:
    """Yield a pool whose only thread is busy until the event is set."""
    threads, over, begun = BoundedThreads("jobs", 1, limit), threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        over.wait(60)

    working = asyncio.create_task(threads.run(work))
    await until(begun.is_set)
    try:
        yield threads, over
    finally:
        over.set()
        await working
        threads.close()


async def test_so_many_may_wait_and_of_an_owner_half_of_them() -> None:
    async with busy(4) as (threads, over):
        waiting = [asyncio.create_task(threads.run(lambda: 1, "greedy")) for _ in range(2)]
        await until(lambda: threads.waiting == 2)
        with pytest.raises(TenantLimitError, match="tenant 'greedy': 2 of its jobs are waiting"):
            await threads.run(lambda: 1, "greedy")
        waiting += [asyncio.create_task(threads.run(lambda: 1, owner)) for owner in ("", "another")]
        await until(lambda: threads.waiting == 4)
        with pytest.raises(OverloadedError, match="4 jobs are waiting"):
            await threads.run(lambda: 1)
        over.set()
        assert await asyncio.gather(*waiting) == [1] * 4
        assert threads.waiting == 0
        assert not threads._owners


async def test_nobody_waits_for_longer_than_it_likes() -> None:
    async with busy(4) as (threads, _):
        with pytest.raises(OverloadedError, match=r"no thread for jobs became free within 0\.05 s"):
            await threads.run(lambda: 1, patience=0.05)
        assert threads.waiting == 0


async def test_who_leaves_makes_room() -> None:
    async with busy(1) as (threads, _):
        left = asyncio.create_task(threads.run(lambda: 1))
        await until(lambda: threads.waiting == 1)
        left.cancel()
        await asyncio.wait([left])
        assert threads.waiting == 0


async def test_closing_does_not_wait_for_running_work() -> None:
    """Waiting would block the event loop, and with it all streams of the service."""
    threads, over = BoundedThreads("jobs", 1, 4), threading.Event()
    working = asyncio.create_task(threads.run(lambda: over.wait(60)))
    await asyncio.sleep(0)  # it runs now
    asyncio.get_running_loop().call_later(5, over.set)
    begin = time.monotonic()
    threads.close()
    assert time.monotonic() - begin < 2
    over.set()
    assert await working


async def test_closing_may_wait_for_running_work() -> None:
    threads, ended = BoundedThreads("jobs", 1, 4), list[int]()

    def work() -> None:
        time.sleep(0.05)
        ended.append(1)

    working = asyncio.create_task(threads.run(work))
    await asyncio.sleep(0)  # it runs now
    threads.close(wait=True)
    assert ended
    await working
