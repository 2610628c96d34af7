"""Calls that have begun and not yet said what they want: how long, and how many of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from specdec.serving.errors import DeadlineError, OverloadedError

MAX_UNOPENED = 1024
"""Calls that wait for their first message at once. A caller sends it together with the call."""


class Openings:
    """Awaits the first messages of the calls of one server or service, `seconds` at most for each."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._unopened = 0

    async def first(self, requests: AsyncIterator[Any]) -> Any:
        """The first message, or None if the caller ends its side without one; DeadlineError, OverloadedError."""
        if self._unopened >= MAX_UNOPENED:
            raise OverloadedError(f"{self._unopened} calls have not sent their first message, the limit is reached")
        self._unopened += 1
        try:
            async with asyncio.timeout(self._seconds):
                return await anext(aiter(requests), None)
        except TimeoutError:
            raise DeadlineError(f"no message came within {self._seconds:g} s of the call") from None
        finally:
            self._unopened -= 1
