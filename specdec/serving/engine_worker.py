"""The engine worker: steps sessions with an engine and recovers from failed forward passes.

An exception in a pass (out of memory, a device error, a text the model cannot process) does not identify the session at
fault. If the engine still computes, the sessions of the step are retried one by one (`StepRetry`): clients see a pause.
If it does not, all sessions end so that they can continue at another pod, and the worker accepts no more until the
engine recovers. If recovery takes too long, the process ends, since only a new process can use a lost GPU again.

A memory shortage (`engine/shortage.py`) is no session's fault. Free memory is returned to the system and, after a
pause, the sessions are computed one by one, which needs less memory. After several steps in a row without memory, the
process ends. A session that never gets memory alone, while others do, ends and can continue at another pod.
"""

from __future__ import annotations

import gc
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Generic, TypeVar

import structlog

from specdec.engine.memory import give_freed_memory_back
from specdec.engine.model_file import in_one_line
from specdec.engine.shortage import is_shortage
from specdec.serving.errors import EngineLostError, ModelFailureError, ShortOfMemoryError
from specdec.serving.worker import Worker

log = structlog.get_logger()


Session = TypeVar("Session")


SHORTAGE_PAUSES = (0.0, 0.1, 0.2, 0.4, 0.8)
"""Pauses in seconds after consecutive steps that got no memory: another process may need the memory only briefly. One
more failure ends the process or, if steps of other sessions succeeded meanwhile, the session whose steps fail."""


class StepRetry(Generic[Session]):
    """The sessions on trial in one loop: after a failed step, each is stepped alone. Belongs to the loop's thread."""

    def __init__(self) -> None:
        self._failures: Counter[Session] = Counter()  # errors by session on trial, in the order of their turns
        self._shortages: Counter[Session] = Counter()  # steps with this session alone that got no memory

    def next(self, ready: Collection[Session]) -> Session | None:
        """Return the session to step alone next; None if none is on trial."""
        return next((session for session in self._failures if session in ready), None)

    def failed(self, sessions: Sequence[Session]) -> Session | None:
        """Record a failed step. If its only session had failed before, return it: this session must end. Otherwise
        return None."""
        self._failures.update(sessions)
        (session, *others) = sessions
        if others or self._failures[session] < 2:
            return None
        self.forget(session)
        return session

    def got_no_memory(self, sessions: Sequence[Session]) -> Session | None:
        """Record a step that got no memory. Return the session that must end, if any: one whose steps alone got no
        memory too often. The sessions of this step go to the end of the trials."""
        for session in sessions:  # no failure: a shortage is no session's fault
            self._failures[session] = self._failures.pop(session, 0)
        (session, *others) = sessions
        if others:
            return None
        self._shortages[session] += 1
        if self._shortages[session] <= len(SHORTAGE_PAUSES):
            return None
        self.forget(session)
        return session

    def forget(self, session: Session) -> None:
        """Take a session off trial: its step succeeded, or it has ended."""
        self._failures.pop(session, None)
        self._shortages.pop(session, None)


CHECK_SECONDS = 1.0
"""Seconds between checks of whether a failed engine computes again."""

LOST_SECONDS = 60.0
"""Seconds without a working engine after which the process ends."""

SHORTAGE_SECONDS = 10.0
"""Seconds without memory for any forward pass after which the process ends: a restarted one needs less memory."""


class EngineWorker(Worker, Generic[Session]):
    """A worker that steps while its engine works."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._failed_at = 0.0
        self._retry: StepRetry[Session] = StepRetry()
        self._shortages = 0  # consecutive steps that got no memory
        self._resume_at = 0.0  # no step before this time, after a shortage

    @abstractmethod
    def step(self) -> float | None:
        """Do the work that is due, as in `turn`; called while the engine works."""

    @abstractmethod
    def recover(self) -> bool:
        """Return whether the engine computes, after a failed forward pass."""

    @abstractmethod
    def end_session(self, session: Session, error: Exception) -> None:
        """End a session with an error."""

    @abstractmethod
    def end_sessions(self, error: Exception) -> None:
        """End all sessions and clear the engine's memory of them."""

    def turn(self) -> float | None:
        if (pause := self._resume_at - time.monotonic()) > 0:
            return pause
        if not self.works:
            self.works = self.recover()
            if not self.works:
                lost = time.monotonic() - self._failed_at
                if self._shortages and lost > SHORTAGE_SECONDS:
                    raise MemoryError(f"no forward pass could allocate memory for {lost:.0f} s")
                if lost > LOST_SECONDS:
                    raise EngineLostError
                return CHECK_SECONDS
            self._shortages = 0
            log.warning("engine_back")
        return self.step()

    def check_works(self) -> None:
        """Raise EngineLostError if the engine does not compute."""
        if not self.works:
            raise EngineLostError

    def step_succeeded(self, sessions: Iterable[Session]) -> None:
        """Record that a step over rows of these sessions succeeded."""
        self._shortages = 0
        for session in sessions:
            self._retry.forget(session)

    def step_failed(self, sessions: Sequence[Session], error: Exception) -> None:
        """Handle a failed forward pass over rows of these sessions."""
        if is_shortage(error):
            self._got_no_memory(sessions, error)
            return
        self._shortages = 0
        log.error("step_failed", sessions=len(sessions), exc_info=error)
        self._failed_at = time.monotonic()
        self.works = self.recover()
        if not self.works:
            self.end_sessions(EngineLostError())
            return
        guilty = self._retry.failed(sessions)
        if guilty is not None:
            self.end_session(guilty, ModelFailureError("every forward pass with this text fails"))

    def _got_no_memory(self, sessions: Sequence[Session], error: Exception) -> None:
        """Retry the sessions one by one after a pause. After too many failed steps in a row, raise MemoryError, which
        ends the process."""
        self._shortages += 1
        log.error("memory_short", sessions=len(sessions), in_a_row=self._shortages, error=in_one_line(error))
        if self._shortages > len(SHORTAGE_PAUSES):
            raise MemoryError(f"{self._shortages} consecutive steps could not allocate memory") from error
        self._resume_at = time.monotonic() + SHORTAGE_PAUSES[self._shortages - 1]
        gc.collect()
        give_freed_memory_back()
        if not self.recover():  # the probe got no memory either; the failed step left partial writes
            self.works, self._failed_at = False, time.monotonic()
            self.end_sessions(ShortOfMemoryError())
            return
        too_large = self._retry.got_no_memory(sessions)
        if too_large is not None:  # other sessions got memory meanwhile: else the process would have ended
            self._shortages = 0
            self.end_session(too_large, ShortOfMemoryError())
