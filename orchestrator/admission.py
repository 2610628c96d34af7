"""How sessions are opened at a verifier that may be full: a few at a time.

In a flood every request would otherwise be carried to the verifier to be refused there, and the refusals would be
slow when they are wanted most. So once the verifier has refused a session for want of room, those who wait to
open one are refused for the same reason, and so is who comes in the next moment, without asking.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from specdec.serving.errors import OverloadedError

AT_ONCE = 64
"""Sessions being opened, at most: each opening takes the verifier no longer than a step."""

MOMENT = 0.05
"""Seconds for which a refusal stands for others."""


class Admission:
    """To one verifier."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._openings = asyncio.Semaphore(AT_ONCE)
        self._refusal: OverloadedError | None = None
        self._stands_until = 0.0

    @asynccontextmanager
    async def opening(self) -> AsyncIterator[None]:
        """Around the opening of a session; OverloadedError if it is no use."""
        self._check()
        async with self._openings:
            self._check()
            try:
                yield
            except OverloadedError as refusal:
                self._refusal, self._stands_until = refusal, self._clock() + MOMENT
                raise

    def _check(self) -> None:
        if self._refusal is not None and self._clock() < self._stands_until:
            raise OverloadedError(str(self._refusal), self._refusal.retry_after)
