"""The services' workers in greenlets instead of threads: a worker switches to the event loop when it would block.

One thread does everything, in an order that depends on virtual time only, so runs are exactly reproducible.
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from draft_service.draft_loop import DraftLoop
from specdec.serving.worker import Worker
from verifier_service.step_loop import StepLoop

Action = Callable[[], None] | None


_resumed = 0.0
"""Real time at which the running worker was last resumed."""


def sleep(seconds: float) -> None:
    """Let virtual time pass in a worker, as a forward pass does."""
    me = getcurrent()
    asyncio.get_running_loop().call_later(seconds, me.switch)
    _wait(me)


def host_seconds() -> float:
    """Return the real seconds this worker has run since it last waited."""
    return time.perf_counter() - _resumed


def unspent_seconds() -> float:
    """Return the running worker's real seconds not yet on the clock; 0 on the event loop."""
    return 0.0 if getcurrent().parent is None else host_seconds()


def _wait(me: greenlet) -> None:
    global _resumed
    assert me.parent is not None  # the event loop's own greenlet has no parent, and must not wait
    me.parent.switch()
    _resumed = time.perf_counter()


class Inbox:
    """A `queue.SimpleQueue` whose reader is a worker."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()
        self._reader: greenlet | None = None  # the waiting worker
        self._alarm: asyncio.TimerHandle | None = None  # ends its wait at the timeout

    def put(self, action: Action) -> None:
        self._actions.append(action)
        if self._reader is not None:
            asyncio.get_running_loop().call_soon(self._disarm().switch)

    def get(self, timeout: float | None = None) -> Action:
        if not self._actions:
            self._reader = getcurrent()
            if timeout is not None:
                self._alarm = asyncio.get_running_loop().call_later(timeout, lambda: self._disarm().switch())
            _wait(self._reader)
        return self.get_nowait()

    def get_nowait(self) -> Action:
        if not self._actions:
            raise queue.Empty
        return self._actions.popleft()

    def qsize(self) -> int:
        return len(self._actions)

    def _disarm(self) -> greenlet:
        """Return the waiting worker, and clear it: it is woken only once."""
        reader, self._reader = self._reader, None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        assert reader is not None
        return reader


class SpendingInbox(Inbox):
    """An inbox whose reader spends the real time of its own code on the virtual clock before it waits."""

    def get(self, timeout: float | None = None) -> Action:
        sleep(host_seconds())
        return super().get(timeout)


class Turns:
    """A stand-in for a worker's thread."""

    def __init__(self, name: str, run: Callable[[], None]) -> None:
        self.name = name
        self.ended = asyncio.Event()
        self._run = run

    def start(self) -> None:
        asyncio.get_running_loop().call_soon(greenlet(self._all).switch)

    def join(self) -> None:
        """Do nothing: the caller runs on the event loop and cannot wait; the worker ends when the loop gets to it."""

    def _all(self) -> None:
        global _resumed
        _resumed = time.perf_counter()
        self._run()
        self.ended.set()


class OnVirtualTime(Worker):
    """A mixin for workers that replaces their inbox and thread with stand-ins from this module."""

    def __init__(self, *args: Any, inbox: type[Inbox] = Inbox, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._inbox = inbox()  # type: ignore[assignment]
        self._turns = Turns(self._thread.name, self._run)
        self._thread = self._turns  # type: ignore[assignment]

    def _run(self) -> None:
        try:
            self._take_turns()
        except Exception as error:  # not KeyboardInterrupt: this is the main thread, and the event loop handles it
            self._end_process(error)

    async def end(self) -> None:
        """Stop after the current forward pass."""
        self.stop()
        await self._turns.ended.wait()


class VirtualStepLoop(OnVirtualTime, StepLoop):
    @property
    def last_step(self) -> float:
        """Time at which the last step ended."""
        return self._last_step


class VirtualDraftLoop(OnVirtualTime, DraftLoop):
    pass
