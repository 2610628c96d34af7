"""Several streams merged into one, in order of arrival."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


async def interleaved(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """Yield the items of all streams. The first failure ends all streams and is raised."""
    queue: asyncio.Queue[tuple[Item] | None] = asyncio.Queue(maxsize=1)

    async def drain(stream: AsyncGenerator[Item, None]) -> None:
        async with aclosing(stream):
            async for item in stream:
                await queue.put((item,))

    async def drain_all() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for stream in streams:
                    group.create_task(drain(stream))
        except ExceptionGroup as errors:
            await queue.put(None)
            raise errors.exceptions[0] from None
        await queue.put(None)

    work = asyncio.create_task(drain_all())
    try:
        while (found := await queue.get()) is not None:
            yield found[0]
        await work  # raises the failure, if any
    finally:
        work.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await work
