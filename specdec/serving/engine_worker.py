"""The engine worker: steps sessions with an engine, and recovers when a forward pass fails.

An exception in a pass (out of memory, a device error, a text that the model cannot take) does not say which session has
caused it. If the engine still computes, the sessions of the step are tried again, one by one (`StepRetry`): a reader
sees a pause. If it does not, all sessions end, so that they can go on at another pod, and the worker takes no more
until it does. If that takes too long the process ends: a GPU that was lost comes back to another one, if at all.

Where memory is short (`engine/shortage.py`) no session is at fault. What is free goes back to the system; after a pause
the sessions are computed one by one, which takes less. If no step gets its memory, time after time, the process ends.
"""

from __future__ import annotations

import gc
import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import structlog

from specdec.engine.memory import give_freed_memory_back
from specdec.engine.model_file import in_one_line
from specdec.engine.shortage import is_shortage
from specdec.serving.errors import EngineLostError, ModelFailureError, ShortOfMemoryError
from specdec.serving.step_retry import StepRetry
from specdec.serving.worker import Worker

log = structlog.get_logger()

CHECK_SECONDS = 1.0
"""Seconds between two checks of whether an engine that has failed computes again."""

LOST_SECONDS = 60.0
"""Seconds without an engine that computes after which the process ends."""

SHORTAGE_PAUSES = (0.0, 0.1, 0.2, 0.4, 0.8)
"""Seconds of the pauses after steps in a row that got no memory: what another process takes for a moment comes back.
One step more without memory ends the process."""

SHORTAGE_SECONDS = 10.0
"""Seconds without memory for any forward pass after which the process ends: started anew, it takes less."""

Session = TypeVar("Session")


class EngineWorker(Worker, Generic[Session]):
    """A worker that takes turns for as long as its engine works."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._worked = 0.0  # time when the engine is last known to have computed, while it does not
        self._retry: StepRetry[Session] = StepRetry()
        self._shortages = 0  # steps in a row that got no memory
        self._resume_at = 0.0  # time until which nothing is computed, after a shortage

    @abstractmethod
    def step(self) -> float | None:
        """Do what can be done now, like `turn`; called while the engine works."""

    @abstractmethod
    def recover(self) -> bool:
        """Return whether the engine computes again, after a forward pass has failed."""

    @abstractmethod
    def end_session(self, session: Session, error: Exception) -> None:
        """End a session with an error."""

    @abstractmethod
    def end_sessions(self, error: Exception) -> None:
        """End all sessions, and forget what the engine has in memory."""

    def turn(self) -> float | None:
        if (pause := self._resume_at - time.monotonic()) > 0:
            return pause
        if not self.works:
            self.works = self.recover()
            if not self.works:
                lost = time.monotonic() - self._worked
                if self._shortages and lost > SHORTAGE_SECONDS:
                    raise MemoryError(f"no forward pass has got its memory for {lost:.0f} s")
                if lost > LOST_SECONDS:
                    raise EngineLostError
                return CHECK_SECONDS
            self._shortages = 0
            log.warning("engine_back")
        return self.step()

    def check_works(self) -> None:
        """Raise EngineLostError if nothing can be computed."""
        if not self.works:
            raise EngineLostError

    def step_succeeded(self) -> None:
        """Note that a step has got all the memory that it needs."""
        self._shortages = 0

    def step_failed(self, sessions: Sequence[Session], error: Exception) -> None:
        """Handle a failed forward pass over rows of these sessions."""
        if is_shortage(error):
            self._got_no_memory(sessions, error)
            return
        log.error("step_failed", sessions=len(sessions), exc_info=error)
        self._worked = time.monotonic()
        self.works = self.recover()
        if not self.works:
            self.end_sessions(EngineLostError())
            return
        guilty = self._retry.failed(sessions)
        if guilty is not None:
            self.end_session(guilty, ModelFailureError("every forward pass over this text fails"))

    def _got_no_memory(self, sessions: Sequence[Session], error: Exception) -> None:
        """Try the sessions of a step that got no memory once more, one by one after a pause; MemoryError if no step of
        several in a row got it, which ends the process."""
        self._shortages += 1
        log.error("memory_short", sessions=len(sessions), in_a_row=self._shortages, error=in_one_line(error))
        if self._shortages > len(SHORTAGE_PAUSES):
            raise MemoryError(f"{self._shortages} steps in a row got no memory") from error
        self._resume_at = time.monotonic() + SHORTAGE_PAUSES[self._shortages - 1]
        gc.collect()
        give_freed_memory_back()
        self._retry.failed(sessions)  # one by one; that names a culprit, but here there is none
        if not self.recover():  # its own pass is short of memory too, and what the failed one wrote is still there
            self.works, self._worked = False, time.monotonic()
            self.end_sessions(ShortOfMemoryError())
