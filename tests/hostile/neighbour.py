"""A well-behaved caller that requests the same two texts every few seconds, whatever else happens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from specdec.client import AsyncClient, SpecdecError

EVERY_SECONDS = 3.0
MAX_SECONDS = 20.0
"""Time limit of both texts in seconds, on a machine under attack."""

ASKS: tuple[Mapping[str, Any], ...] = (
    {"prompt": "the quick brown fox", "temperature": 0.0, "max_tokens": 60, "ignore_end_token": True},
    {"prompt": "jumps over", "temperature": 0.8, "seed": 11, "max_tokens": 60, "ignore_end_token": True},
)


class Neighbour:
    """Knows the right texts; `faults` describe wrong and late ones."""

    def __init__(self, address: str, **options: Any) -> None:
        """`options` are a client's, such as its API key."""
        self._client = AsyncClient(address, timeout=MAX_SECONDS, max_retries=12, **options)
        self._wanted: list[list[int]] = []
        self.seconds: list[float] = []  # for both texts, each time
        self.faults: list[str] = []

    async def first(self) -> None:
        """Record the reference texts by plain decoding, before the attack."""
        self._wanted = await self._texts(speculation="off")

    async def ask(self) -> None:
        """Request once, and compare."""
        begun = time.monotonic()
        try:
            async with asyncio.timeout(MAX_SECONDS):
                got = await self._texts()
        except (SpecdecError, TimeoutError) as error:
            self.faults.append(f"no text: {type(error).__name__}: {error}"[:300])
            return
        finally:
            self.seconds.append(time.monotonic() - begun)
        if got != self._wanted:
            self.faults.append(f"other texts: {got}, not {self._wanted}")

    async def ask_on(self) -> None:
        """Repeat until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(EVERY_SECONDS)

    async def close(self) -> None:
        await self._client.close()

    async def _texts(self, **options: Any) -> list[list[int]]:
        results = await asyncio.gather(*(self._client.complete(**ask, **options) for ask in ASKS))
        return [list(result.completions[0].tokens) for result in results]

    def report(self) -> str:
        return f"{len(self.seconds)} pairs of normal requests, {max(self.seconds, default=0.0):.2f} s at most"
