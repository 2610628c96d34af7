"""A thread pool with a bounded number of waiting callers, for long work started from the event loop.

A waiting caller has no entry in the executor's queue, so cancelling it frees its work's data.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from specdec.serving.errors import OverloadedError, TenantLimitError
from specdec.serving.fair_turns import FairTurns
from specdec.serving.futures import retrieve

Result = TypeVar("Result")


class BoundedThreads:
    """`threads` threads with places for `limit` waiting callers; owners take turns. `work` is a plural noun for the
    work, used in error messages. With `reserve`, no named owner may hold all of several threads. `executor` supplies
    threads of another kind."""

    def __init__(
        self, work: str, threads: int, limit: int, *, reserve: bool = False, executor: ThreadPoolExecutor | None = None
    ) -> None:
        self._work = work
        self._limit = limit
        self._executor = executor or ThreadPoolExecutor(threads, work)
        self._turns = FairTurns(threads, reserve=reserve)
        self._owners: Counter[str] = Counter()  # waiting callers by owner
        self.waiting = 0

    async def run(self, action: Callable[[], Result], owner: str = "", patience: float | None = None) -> Result:
        """Run an action in a thread and return its result. OverloadedError if the limit of waiting callers is reached,
        or if no thread becomes free within `patience` seconds; TenantLimitError if this owner already has half of the
        waiting places."""
        if self.waiting >= self._limit:
            raise OverloadedError(f"{self.waiting} {self._work} are waiting, the limit is reached")
        own = self._owners[owner]
        if owner and own >= max(1, self._limit // 2):
            problem = f"{own} of its {self._work} are waiting, the limit is reached"
            raise TenantLimitError(owner, problem, retry_after=1.0)
        self.waiting += 1
        self._owners[owner] += 1
        try:
            async with asyncio.timeout(patience):
                await self._turns.acquire(owner)
        except TimeoutError:
            raise OverloadedError(f"no thread for {self._work} became free within {patience:g} s") from None
        finally:
            self.waiting -= 1
            self._owners[owner] -= 1
            if not self._owners[owner]:
                del self._owners[owner]

        try:
            work = asyncio.get_running_loop().run_in_executor(self._executor, action)
        except BaseException:  # no thread could be started
            self._turns.release(owner)
            raise
        work.add_done_callback(lambda _: self._turns.release(owner))
        work.add_done_callback(retrieve)
        return await asyncio.shield(work)  # a cancelled caller leaves its thread running

    def close(self, *, wait: bool = False) -> None:
        """Start no more work. With `wait`, block the event loop until running work has ended."""
        self._executor.shutdown(wait=wait, cancel_futures=True)
