"""Openings: awaits the first messages of calls that have begun, within limits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from specdec.serving.errors import DeadlineError, OverloadedError

MAX_UNOPENED = 1024
"""Calls that may wait for their first message at once. A caller sends it together with the call, so if there are more,
the one that has waited longest is ended."""


class Openings:
    """Awaits the first messages of the calls of one server or service, `seconds` at most for each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[asyncio.Timeout, None] = {}  # the oldest first
        self._ended: set[asyncio.Timeout] = set()  # for others

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """Return the first message, or None if the caller ends its side without one; DeadlineError if it takes too
        long, OverloadedError if it is ended for later calls."""
        if len(self._waiting) >= MAX_UNOPENED:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._ended.add(oldest)
            if not oldest.expired():  # its task has not noticed yet
                oldest.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self._seconds) as limit:
                self._waiting[limit] = None
                return await anext(aiter(requests), None)
        except TimeoutError:
            if limit in self._ended:
                raise OverloadedError(f"{MAX_UNOPENED} later calls wait for their first message") from None
            raise DeadlineError(f"no message arrived within {self._seconds:g} s after the call began") from None
        finally:
            self._waiting.pop(limit, None)
            self._ended.discard(limit)
