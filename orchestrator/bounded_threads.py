"""Threads for work that takes long, given out by turns on the event loop.

Who waits for a turn has nothing in a thread's queue: if its caller leaves, so does what it would have worked on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specdec.serving.errors import OverloadedError

Result = TypeVar("Result")


class BoundedThreads:
    """So many `threads`, for which `limit` callers may wait. `work` says what they do, in the plural."""

    def __init__(self, work: str, threads: int, limit: int) -> None:
        self._work = work
        self._limit = limit
        self._executor = ThreadPoolExecutor(threads, work)
        self._free = asyncio.Semaphore(threads)
        self.waiting = 0

    async def run(self, action: Callable[[], Result]) -> Result:
        """Run an action in a thread; OverloadedError if too many wait for that."""
        if self.waiting >= self._limit:
            raise OverloadedError(f"{self.waiting} {self._work} wait for their turn, the limit is reached")
        self.waiting += 1
        try:
            await self._free.acquire()
        finally:
            self.waiting -= 1
        loop = asyncio.get_running_loop()
        future = self._executor.submit(action)
        # A caller that leaves does not end the thread's work, and the turn lasts as long as that.
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        self._executor.shutdown(cancel_futures=True)
