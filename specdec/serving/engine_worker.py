"""The engine worker: steps sessions with an engine, and recovers when a forward pass fails.

An exception in a pass (out of memory, a device error, a text that the model cannot take) does not say which session has
caused it. If the engine still computes, the sessions of the step are tried again, one by one (`StepRetry`): a reader
sees a pause. If it does not, all sessions end, so that they can go on at another pod, and the worker takes no more
until it does. If that takes too long the process ends: a GPU that was lost comes back to another one, if at all.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Sequence
from typing import Generic, TypeVar

import structlog

from specdec.serving.errors import EngineLostError, ModelFailureError
from specdec.serving.step_retry import StepRetry
from specdec.serving.worker import Worker

log = structlog.get_logger()

CHECK_SECONDS = 1.0
"""Seconds between two checks of whether an engine that has failed computes again."""

LOST_SECONDS = 60.0
"""Seconds without an engine that computes after which the process ends."""

Session = TypeVar("Session")


class EngineWorker(Worker, Generic[Session]):
    """A worker that takes turns for as long as its engine works."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._worked = 0.0  # time when the engine is last known to have computed, while it does not
        self._retry: StepRetry[Session] = StepRetry()

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
        if not self.works:
            self.works = self.recover()
            if not self.works:
                if time.monotonic() - self._worked > LOST_SECONDS:
                    raise EngineLostError
                return CHECK_SECONDS
            log.warning("engine_back")
        return self.step()

    def check_works(self) -> None:
        """Raise EngineLostError if nothing can be computed."""
        if not self.works:
            raise EngineLostError

    def step_failed(self, sessions: Sequence[Session], error: Exception) -> None:
        """Handle a failed forward pass over rows of these sessions."""
        log.error("step_failed", sessions=len(sessions), exc_info=error)
        self._worked = time.monotonic()
        self.works = self.recover()
        if not self.works:
            self.end_sessions(EngineLostError())
            return
        guilty = self._retry.failed(sessions)
        if guilty is not None:
            self.end_session(guilty, ModelFailureError("every forward pass over this text fails"))
