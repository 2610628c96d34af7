"""Work that is repeated in the background."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

log = structlog.get_logger()


class Periodic:
    """Work done every `seconds`, from `start` until `close`. A failure is logged as `event` and does not end the
    repetition."""

    def __init__(self, work: Callable[[], Awaitable[object]], seconds: float, event: str) -> None:
        self._work = work
        self._seconds = seconds
        self._event = event
        self._repeating: asyncio.Task[None] | None = None

    @property
    def is_started(self) -> bool:
        return self._repeating is not None

    def start(self) -> None:
        """Start; the first repetition comes after `seconds`."""
        self._repeating = asyncio.create_task(self._repeat())

    async def close(self) -> None:
        """Stop, if started, and wait until the work has ended."""
        if self._repeating is not None:
            self._repeating.cancel()
            await asyncio.wait([self._repeating])

    async def _repeat(self) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            try:
                await self._work()
            except Exception:
                log.exception(self._event)
