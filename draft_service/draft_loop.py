"""The draft loop: expands the most probable nodes of all sessions in one forward pass, sends candidates, and repeats.

It runs in its own thread and owns every session. A commit takes effect between two steps; while no session has a node
worth computing, the loop sleeps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from draft_service.session import Extension, Session
from specdec.engine.engine import Engine
from specdec.engine.kv.slots import KVPool
from specdec.serving.engine_worker import EngineWorker

log = structlog.get_logger()

STEP_SMOOTHING = 0.1
"""Weight of the latest step in the moving average of step seconds."""

READER_WAIT_SECONDS = 0.25
"""Seconds until the loop looks again at a session whose reader is far behind."""


@dataclass
class RunningSession:
    """A session and where its extensions go. `emit` is called in the loop's thread and must not block."""

    session: Session
    emit: Callable[[Extension], None]
    fail: Callable[[Exception], None]
    takes_more: Callable[[], bool] = lambda: True  # False: its reader has yet to take what was emitted


class DraftLoop(EngineWorker[Session]):
    """The worker that steps all draft sessions with one engine.

    One step computes at most `rows` nodes over all sessions, at most `rows_per_session` of one session, and at most
    `prompt_budget` tokens of committed text over all sessions."""

    def __init__(self, engine: Engine, *, rows: int = 16, rows_per_session: int = 4, prompt_budget: int = 512) -> None:
        super().__init__("draft-loop", engine)
        self.steps = 0
        self._pool = KVPool(engine.capacity)
        self._rows = rows
        self._rows_per_session = rows_per_session
        self._prompt_budget = prompt_budget
        self._sessions: dict[int, RunningSession] = {}
        self._step_seconds = 0.0  # moving average

    @property
    def slots_used(self) -> int:
        return self._pool.used

    # --- actions: called in the loop's thread -----------------------------------------------------

    def attach(self, entry: RunningSession) -> None:
        """Give a session its memory; PoolFullError if none is left, EngineLostError if nothing can be computed."""
        self.check_works()
        session = entry.session
        session.allocate(self._pool.take(session.end + session.policy.max_nodes))
        self._sessions[id(session)] = entry

    def detach(self, session: Session) -> None:
        self._retry.forget(session)
        if self._sessions.pop(id(session), None) is not None:
            self._pool.give(session.slots)

    def end_session(self, session: Session, error: Exception) -> None:
        entry = self._sessions[id(session)]
        self.detach(session)
        entry.fail(error)

    def end_sessions(self, error: Exception) -> None:
        for entry in list(self._sessions.values()):
            self.end_session(entry.session, error)

    # --- the loop ---------------------------------------------------------------------------------

    def step(self) -> float | None:
        reaches = [(entry.session.best_logprob(), entry) for entry in self._sessions.values()]
        runnable = [reached for reached in reaches if reached[0] > -math.inf]
        if runnable:
            runnable.sort(key=lambda reached: -reached[0])
            suspect = self._retry.next({entry.session for _, entry in runnable})
            if suspect is not None:
                runnable = [reached for reached in runnable if reached[1].session is suspect]
            start = time.monotonic()
            self._step([entry for _, entry in runnable])
            self._step_seconds += STEP_SMOOTHING * (time.monotonic() - start - self._step_seconds)
        now = time.monotonic()
        wake = self._send(now)
        if runnable:
            return 0.0
        return None if wake is None else max(0.0, wake - now)

    def _step(self, runnable: list[RunningSession]) -> None:
        """Run one step for sessions with something worth computing, best first."""
        packer = self._engine.packer()
        rows, prompt_budget = self._rows, self._prompt_budget
        share = max(1, min(self._rows_per_session, rows // len(runnable)))
        planned: list[RunningSession] = []
        try:
            for entry in runnable:
                session = entry.session
                if session.pending_text:
                    if prompt_budget > 0:
                        planned.append(entry)
                        prompt_budget -= session.plan_text(packer, prompt_budget)
                elif rows > 0:
                    planned.append(entry)
                    rows -= session.plan_nodes(packer, min(share, rows))
            logits = self._engine.forward(packer.pack())
        except Exception as error:  # the whole step is void; its sessions are tried again
            for entry in planned:
                entry.session.undo_step()
            self.step_failed([entry.session for entry in planned], np.asarray(packer.slots, dtype=np.int64), error)
            return
        self.steps += 1
        for entry in planned:
            self._retry.forget(entry.session)
            try:
                entry.session.expand(logits)
            except Exception as error:  # one session's error does not end the others
                log.error("session_failed", exc_info=error)
                self.end_session(entry.session, error)

    def _send(self, now: float) -> float | None:
        """Send what is due; return the time of the next send, None if none is planned."""
        wake: float | None = None
        for entry in self._sessions.values():
            session = entry.session
            if not entry.takes_more():
                wake = now + READER_WAIT_SECONDS if wake is None else min(wake, now + READER_WAIT_SECONDS)
                continue
            due = session.send_at(self._step_seconds)
            if due <= now:
                entry.emit(session.take_unsent(now))
            elif due < math.inf:
                wake = due if wake is None else min(wake, due)
        return wake
