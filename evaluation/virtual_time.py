"""Virtual time: an event loop that, with nothing to do, is at once where the next timer is due.

Whatever asks `time.monotonic` meanwhile is told the loop's time, policies and the services' worker threads included.
Where the code of workers takes time, they are ahead of the loop by what they have not spent yet (`ahead`): their clock
shows it, and what they send leaves as much later.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

START = 1000.0
"""Seconds on the clock when it starts: as on a real one, nothing has happened at 0."""

TICK = 1e-9
"""Seconds that asking for the time takes. If it took none, who asks until a moment has passed would ask for ever: a
sum of floats may fall short of that moment by its last bit."""

T = TypeVar("T")


class DeadlockError(RuntimeError):
    """Everybody waits, and nothing is due."""


class _Timers(selectors.SelectSelector):
    """Waits for timers alone: files are nobody's on virtual time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = START

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise DeadlockError("everybody waits, and nothing is due")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Has one thread, so that calls from other threads are calls of its own."""

    def __init__(self) -> None:
        self._timers = _Timers()
        self.ahead: Callable[[], float] = _not_ahead
        """Returns the seconds by which whoever runs now is ahead of this loop."""
        super().__init__(self._timers)

    def time(self) -> float:
        return self._timers.now

    def monotonic(self) -> float:
        """In place of `time.monotonic`."""
        self._timers.now += TICK
        return self._timers.now + self.ahead()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        """Run it at once: a thread's time is not on this clock."""
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
    """`asyncio.run` on virtual time; DeadlockError if nothing can go on."""
    loop = VirtualLoop()
    with asyncio.Runner(loop_factory=lambda: loop) as runner, _as_the_clock(loop.monotonic):
        return runner.run(main)


@contextmanager
def _as_the_clock(monotonic: Callable[[], float]) -> Iterator[None]:
    """Have whoever asks `time.monotonic` ask this one."""
    real = time.monotonic
    time.monotonic = monotonic
    try:
        yield
    finally:
        time.monotonic = real
