"""Disconnects: cancels the work for a caller that has left."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class CallerLeftError(Exception):
    """The caller has disconnected."""


async def while_present(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work` and return its result. If the caller disconnects, cancel it and raise CallerLeftError. The request's
    body must have been read before."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise CallerLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
