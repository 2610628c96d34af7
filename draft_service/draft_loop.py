"""The draft loop: in every step the drafter expands the most probable nodes of all sessions, and candidates are sent.

It runs in its own thread and owns every session. Commits take effect between steps. The loop sleeps while no session
has a node worth expanding.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import structlog

from draft_service.candidate_queue import Extension
from draft_service.drafter import Drafter, ExpansionError
from draft_service.metrics import DraftStats
from draft_service.session import DrafterSession
from draft_service.traffic import Traffic
from specdec.serving.engine_worker import EngineWorker
from specdec.serving.response_queue import ResponseQueue

log = structlog.get_logger()

STEP_SMOOTHING = 0.1
"""Weight of the latest step in the moving average of step seconds."""

READER_WAIT_SECONDS = 0.25
"""Seconds before retrying a session with a full response queue."""


@dataclass
class ServedSession:
    """A session, its response queue, and the function that turns an extension into a message."""

    session: DrafterSession
    responses: ResponseQueue[Any]
    message: Callable[[Extension], Any]


class DraftLoop(EngineWorker[DrafterSession]):
    """The worker that steps all draft sessions with one drafter."""

    def __init__(self, drafter: Drafter, traffic: Traffic | None = None) -> None:
        """`traffic` keeps the texts that may be learned from; None: no text is kept."""
        super().__init__("draft-loop")
        self.drafter = drafter
        self.traffic = traffic
        self.steps = 0
        self.stats = DraftStats()
        self._sessions: dict[DrafterSession, ServedSession] = {}
        self._step_seconds = 0.0  # moving average

    # --- actions: called in the loop's thread -----------------------------------------------------

    def attach(self, entry: ServedSession) -> None:
        """Allocate a session's memory; PoolFullError if none is left, EngineLostError if the engine is lost."""
        self.check_works()
        self.drafter.open(entry.session)
        self._sessions[entry.session] = entry

    def commit(self, session: DrafterSession, base: int, tokens: list[int], arrived: float) -> None:
        """Commit tokens to a session's text; `arrived`: arrival by `time.monotonic`. Errors as in
        `DrafterSession.commit`."""
        session.outgoing.commit_arrived(arrived)
        move = session.commit(base, tokens)
        if session in self._sessions:  # an error may have ended it while the commit was in flight
            self.stats.committed += len(move.tokens)
            self.stats.guessed += len(move.followed)
            self.drafter.commit(session, move)

    def add_features(self, session: DrafterSession, first: int, values: bytes) -> None:
        """Add features of a session's text. Errors as in `Drafter.add_features`."""
        if session in self._sessions:
            self.drafter.add_features(session, first, values)

    def detach(self, session: DrafterSession) -> None:
        """Forget a session, free its memory, and keep its text if `traffic` may; no-op for an unknown one."""
        self._retry.forget(session)
        if self._sessions.pop(session, None) is not None:
            if self.traffic is not None:
                self.traffic.keep(session)
            self.drafter.close(session)

    def end_session(self, session: DrafterSession, error: Exception) -> None:
        entry = self._sessions[session]
        self.detach(session)
        entry.responses.send(error)

    def end_sessions(self, error: Exception) -> None:
        for session in list(self._sessions):
            self.end_session(session, error)

    # --- the loop ---------------------------------------------------------------------------------

    def step(self) -> float | None:
        best = {session: self.drafter.best_logprob(session) for session in self._sessions}
        runnable = [session for session, logprob in best.items() if logprob > -math.inf]
        if runnable:
            runnable.sort(key=best.__getitem__, reverse=True)
            start = time.monotonic()
            self._expand(runnable)
            seconds = time.monotonic() - start
            self.stats.busy += seconds
            self._step_seconds += STEP_SMOOTHING * (seconds - self._step_seconds) if self._step_seconds else seconds
        now = time.monotonic()
        wake = self._send(now)
        if runnable:
            return 0.0
        return None if wake is None else max(0.0, wake - now)

    def _expand(self, runnable: list[DrafterSession]) -> None:
        """Expand sessions, the best first. After a failed step, its sessions are expanded one at a time."""
        retried = self._retry.next(runnable)
        sessions = runnable if retried is None else [retried]
        try:
            failed = self.drafter.expand(sessions)
        except ExpansionError as error:  # the whole step is void; its sessions are retried
            self.step_failed(error.sessions or sessions, error.cause)
            return
        except Exception as error:  # a bug in the drafter: the faulty session is unknown
            self.step_failed(sessions, error)
            return
        self.steps += 1
        self.step_succeeded(sessions)
        for session, why in failed.items():
            log.error("session_failed", exc_info=why)
            self.end_session(session, why)

    def recover(self) -> bool:
        return self.drafter.recover()

    def _send(self, now: float) -> float | None:
        """Send the messages that are due; return the time of the next send, None if none is planned."""
        wake = math.inf
        messages: list[tuple[ResponseQueue[Any], Callable[[], Any]]] = []
        for session, entry in self._sessions.items():
            due = session.outgoing.send_at(now, self._step_seconds)
            if due == math.inf:
                continue
            if entry.responses.full:
                wake = min(wake, now + READER_WAIT_SECONDS)
            elif due <= now:
                extension = session.outgoing.pop_extension(now)
                self.stats.sent += len(extension.paths.tokens)
                messages.append((entry.responses, partial(entry.message, extension)))
            else:
                wake = min(wake, due)
        self.stats.messages += len(messages)
        ResponseQueue.send_all(messages)
        return None if wake == math.inf else wake
