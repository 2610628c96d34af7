"""The worker: a thread that owns its state. Actions submitted by other threads run between its turns."""

from __future__ import annotations

import os
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NoReturn, TypeVar

import structlog

from specdec.engine.model_file import in_one_line
from specdec.engine.shortage import is_shortage
from specdec.exit_status import ExitStatus
from specdec.grammar.stacks import SERVICE_STACK_BYTES, stack_of
from specdec.serving.futures import for_other_thread

log = structlog.get_logger()

T = TypeVar("T")


class Worker(ABC):
    """A thread that takes turns while there is work, and sleeps otherwise.

    A worker's state needs no lock: everything happens in its thread, in order.
    """

    def __init__(self, name: str) -> None:
        self.works = True  # False if it can serve no session, for example because its engine fails
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        with stack_of(SERVICE_STACK_BYTES):
            self._thread.start()

    def stop(self) -> None:
        """Stop once the actions submitted so far have run, and join the thread."""
        self._inbox.put(None)
        self._thread.join()

    def submit(self, action: Callable[[], None]) -> None:
        """Run an action in the worker's thread before its next turn. Actions must not raise."""
        self._inbox.put(action)

    async def call(self, action: Callable[[], T]) -> T:
        """Run an action in the worker's thread and await its result or exception."""
        outcome, run = for_other_thread(action)
        self.submit(run)
        return await outcome

    async def caught_up(self) -> None:
        """Wait until all actions submitted so far have run."""
        await self.call(_nothing)

    @abstractmethod
    def turn(self) -> float | None:
        """Do the work that is due. Return the seconds to wait for an action before the next turn; None to wait
        indefinitely."""

    def _run(self) -> None:
        try:
            self._take_turns()
        except BaseException as error:
            self._end_process(error)

    def _take_turns(self) -> None:
        wait: float | None = 0.0
        while self._receive(wait):
            wait = self.turn()

    def _end_process(self, error: BaseException) -> NoReturn:
        """Log the error and exit. Without its worker, the process would answer health checks and nothing else. Peers of
        a dead process fail over immediately, so the process exits, even if logging fails."""
        status = ExitStatus.INTERNAL
        try:
            if is_shortage(error):
                status = ExitStatus.SHORT_OF_MEMORY
                log.critical("memory_short", worker=self._thread.name, ends=True, error=in_one_line(error))
            else:
                log.critical("worker_died", worker=self._thread.name, exc_info=error)
        finally:
            os._exit(status)

    def _receive(self, wait: float | None) -> bool:
        """Run the actions in the inbox, waiting for the first; return False to stop.

        Actions that arrive meanwhile wait for the next turn, so a flood delays the worker but cannot stop it.
        """
        try:
            action = self._inbox.get(timeout=wait) if wait is None or wait > 0 else self._inbox.get_nowait()
        except queue.Empty:
            return True
        waiting = self._inbox.qsize()
        while True:
            if action is None:
                return False
            action()
            if not waiting:
                return True
            waiting -= 1
            action = self._inbox.get_nowait()


def _nothing() -> None:
    """Do nothing: the barrier action of `caught_up`."""
