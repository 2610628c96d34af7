"""Futures of work whose waiting callers may be gone when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


def for_other_thread(action: Callable[[], T]) -> tuple[asyncio.Future[T], Callable[[], None]]:
    """Return a future of this event loop, and a function to call in another thread: it runs the action and settles the
    future. Cancelling the future does not stop the action. The loop may be closed before the action ends."""
    outcome: Future[T] = Future()
    outcome.set_running_or_notify_cancel()  # a cancelled caller does not cancel it

    def run() -> None:
        try:
            outcome.set_result(action())
        except Exception as error:  # any exception belongs to the caller
            outcome.set_exception(error)

    return asyncio.wrap_future(outcome), run


def retrieve(future: asyncio.Future[Any]) -> None:
    """Mark the exception of a done future as retrieved, so that asyncio does not log it if all waiters are gone."""
    if not future.cancelled():
        future.exception()
