"""Pauses of the machine are distinguished from pauses of a process."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from itertools import pairwise

from tests.hostile.standstill import LONG_SECONDS, standstills


async def test_a_pause_of_the_process_that_watches_is_seen() -> None:
    begun = time.monotonic()
    async with standstills() as seen:
        for _ in range(5):
            os.kill(seen.pid, signal.SIGSTOP)
            await asyncio.sleep(2 * LONG_SECONDS)
            os.kill(seen.pid, signal.SIGCONT)
            await asyncio.sleep(LONG_SECONDS)
    assert len(seen.spans) == 5
    assert all(end - begin > LONG_SECONDS for begin, end in seen.spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(seen.spans))
    assert 3 * LONG_SECONDS < seen.within(begun, time.monotonic()) < time.monotonic() - begun
    assert seen.within(0.0, begun) == 0.0


async def test_a_pause_of_another_process_is_not() -> None:
    async with standstills() as seen:
        begun = time.monotonic()
        time.sleep(3 * LONG_SECONDS)  # noqa: ASYNC251 (the pause itself)
        ended = time.monotonic()
    assert seen.within(begun, ended) < 2 * LONG_SECONDS
