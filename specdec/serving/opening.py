"""Openings: bounded waits for the first messages of calls."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from specdec.serving.errors import DeadlineError, OverloadedError

MAX_UNOPENED = 1024
"""Maximum number of calls waiting for their first message. Callers send it together with the call, so above this limit
the longest-waiting call is ended."""


class Openings:
    """Waits for the first messages of the calls of one server or service, at most `seconds` for each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting: dict[asyncio.Timeout, None] = {}  # the oldest first
        self._ended: set[asyncio.Timeout] = set()  # evicted for later calls

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """Return the first message; None if the caller ends its side without one. Raise DeadlineError on timeout,
        OverloadedError if the call is evicted for later calls."""
        if len(self._waiting) >= MAX_UNOPENED:
            oldest = next(iter(self._waiting))
            del self._waiting[oldest]
            self._ended.add(oldest)
            if not oldest.expired():  # an expired call is already ending
                oldest.reschedule(asyncio.get_running_loop().time())
        try:
            async with asyncio.timeout(self._seconds) as limit:
                self._waiting[limit] = None
                return await anext(aiter(requests), None)
        except TimeoutError:
            if limit in self._ended:
                raise OverloadedError(
                    f"the call sent no message, and {MAX_UNOPENED} later calls are waiting: send the first message "
                    "with the call"
                ) from None
            raise DeadlineError(f"no message arrived within {self._seconds:g} s after the call began") from None
        finally:
            self._waiting.pop(limit, None)
            self._ended.discard(limit)
