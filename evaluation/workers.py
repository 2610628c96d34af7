"""Workers of the services without threads: each runs in a greenlet, and the event loop goes on where a thread would
wait.

So one thread does everything, in an order that depends on virtual time only: a run can be repeated exactly.
"""

from __future__ import annotations

import asyncio
import queue
from collections import deque
from collections.abc import Callable
from typing import Any

from greenlet import getcurrent, greenlet

from draft_service.draft_loop import DraftLoop
from specdec.serving.worker import Worker
from verifier_service.step_loop import StepLoop

Action = Callable[[], None] | None


def sleep(seconds: float) -> None:
    """Let virtual time pass, in a worker, as a forward pass does."""
    me = getcurrent()
    asyncio.get_running_loop().call_later(seconds, me.switch)
    _wait(me)


def _wait(me: greenlet) -> None:
    assert me.parent is not None  # the event loop's own greenlet has none, and must not wait
    me.parent.switch()


class Inbox:
    """A `queue.SimpleQueue` whose reader is a worker."""

    def __init__(self) -> None:
        self._actions: deque[Action] = deque()
        self._reader: greenlet | None = None  # the worker that waits
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
        """Return the worker that waited, which is woken once only."""
        reader, self._reader = self._reader, None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        assert reader is not None
        return reader


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
        self._run()
        self.ended.set()


class OnVirtualTime(Worker):
    """A mixin for workers that replaces inbox and thread by those of this module."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._inbox = Inbox()  # type: ignore[assignment]
        self._turns = Turns(self._thread.name, self._run)
        self._thread = self._turns  # type: ignore[assignment]

    async def end(self) -> None:
        """Stop after the forward pass under way."""
        self.stop()
        await self._turns.ended.wait()


class SimulatedStepLoop(OnVirtualTime, StepLoop):
    @property
    def last_step(self) -> float:
        """Time at which the last step ended."""
        return self._last_step


class LockstepLoop(SimulatedStepLoop):
    """A step loop that steps when all its sessions can, like an engine that drafts for a batch, then verifies it."""

    def turn(self) -> float | None:
        self._queue.admit()  # sessions that come meanwhile are not refused because the queue is full
        if all(entry.session.computable for entry in self._queue.running):
            return super().turn()
        return None  # a draft's answer wakes the loop


class SimulatedDraftLoop(OnVirtualTime, DraftLoop):
    pass
