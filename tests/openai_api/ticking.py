"""Measurement of event-loop stalls."""

from __future__ import annotations

import asyncio


class Ticking:
    """A task that only yields, and so measures the longest delay of the event loop."""

    def __init__(self) -> None:
        self.longest = 0.0  # seconds

    async def __aenter__(self) -> Ticking:
        self._task = asyncio.create_task(self._tick())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._task.cancel()

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        last = loop.time()
        while True:
            await asyncio.sleep(0)
            now = loop.time()
            self.longest, last = max(self.longest, now - last), now
