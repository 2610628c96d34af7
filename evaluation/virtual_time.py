"""Virtual time: an event loop that jumps to the next timer when idle.

While it runs, `time.monotonic` returns the loop's time to all code, including policies and the services' worker
threads. A worker whose code takes time is ahead of the loop by its unspent seconds (`ahead`): its clock includes them,
and its messages are delayed by them.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

START = 1000.0
"""Seconds on the clock at the start: as on a real clock, time 0 was long ago."""

TICK = 1e-9
"""Seconds added by every reading of the clock. Otherwise a loop that polls until a certain time might never reach it: a
sum of floats may be too low by its last bit."""

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """All tasks wait, and no timer is due."""


class _Timers(selectors.SelectSelector):
    """Waits only for timers: nothing uses files on virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("all tasks wait, and no timer is due")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop in a process with one thread: even its thread-safe calls come from that thread."""

    def __init__(self) -> None:
        self._timers = _Timers()
        self.ahead: Callable[[], float] = _not_ahead
        """Returns the seconds by which the running worker is ahead of this loop."""
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.now

    def monotonic(self) -> float:
        """Replaces `time.monotonic`."""
        self._timers.now += TICK
        return self._timers.now + self.ahead()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run the function immediately, in no virtual time."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future

    def call_soon_threadsafe(self, callback: Callable[..., object], *args: Any, context: Any = None) -> asyncio.Handle:  # type: ignore[override]
        if ahead := self.ahead():
            return self.call_later(ahead, callback, *args, context=context)
        return self.call_soon(callback, *args, context=context)


def _not_ahead() -> float:
    return 0.0


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` on virtual time; DeadlockError if nothing can continue."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, _as_the_clock(loop.monotonic):
        return runner.run(main)


@contextmanager
def _as_the_clock(monotonic: Callable[[], float]) -> Iterator[None]:
    """Replace `time.monotonic` while the context lasts."""
    real = time.monotonic
    time.monotonic = monotonic
    try:
        yield
    finally:
        time.monotonic = real
