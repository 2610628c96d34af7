"""The growth loop: expand the most promising nodes of all sessions in one forward pass, push, again.

It runs in its own thread and owns every session. A commit takes effect between two steps; when no session
has anything worth guessing, the loop sleeps.
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
from specdec.engine.kv import KVPool
from specdec.serving.engine_worker import EngineWorker

log = structlog.get_logger()

STEP_SMOOTHING = 0.1

UNREAD_SECONDS = 0.25
"""Until a session whose reader is far behind is looked at again."""


@dataclass
class Attached:
    """A session and where its extensions go. `emit` is called from the loop's thread, must not block."""

    session: Session
    emit: Callable[[Extension], None]
    fail: Callable[[Exception], None]
    takes_more: Callable[[], bool] = lambda: True  # False: its reader has yet to take what was emitted


class GrowthLoop(EngineWorker[Session]):
    """`rows`: nodes read in one step, over all sessions; `rows_per_session` of one session at most;
    `prompt_budget`: tokens of text read in one step, over all sessions."""

    def __init__(self, engine: Engine, *, rows: int = 16, rows_per_session: int = 4, prompt_budget: int = 512) -> None:
        super().__init__("growth-loop", engine)
        self.steps = 0
        self._pool = KVPool(engine.capacity)
        self._rows = rows
        self._rows_per_session = rows_per_session
        self._prompt_budget = prompt_budget
        self._attached: dict[int, Attached] = {}
        self._step_seconds = 0.0  # moving average

    @property
    def slots_used(self) -> int:
        return self._pool.used

    # --- actions: called in the loop's thread -----------------------------------------------------

    def attach(self, attached: Attached) -> None:
        """Give a session its memory; PoolFullError if none is left, EngineLostError if nothing can be computed."""
        self.check_works()
        session = attached.session
        session.own(self._pool.take(session.end + session.policy.max_nodes))
        self._attached[id(session)] = attached

    def detach(self, session: Session) -> None:
        self._retrial.forget(session)
        if self._attached.pop(id(session), None) is not None:
            self._pool.give(session.slots)

    def end_session(self, session: Session, error: Exception) -> None:
        attached = self._attached[id(session)]
        self.detach(session)
        attached.fail(error)

    def end_sessions(self, error: Exception) -> None:
        for attached in list(self._attached.values()):
            self.end_session(attached.session, error)

    # --- the loop ---------------------------------------------------------------------------------

    def step(self) -> float | None:
        reaches = [(attached.session.best_reach(), attached) for attached in self._attached.values()]
        hungry = [reached for reached in reaches if reached[0] > -math.inf]
        if hungry:
            hungry.sort(key=lambda reached: -reached[0])
            on_trial = self._retrial.next({attached.session for _, attached in hungry})
            if on_trial is not None:
                hungry = [reached for reached in hungry if reached[1].session is on_trial]
            start = time.monotonic()
            self._step([attached for _, attached in hungry])
            self._step_seconds += STEP_SMOOTHING * (time.monotonic() - start - self._step_seconds)
        now = time.monotonic()
        wake = self._send(now)
        if hungry:
            return 0.0
        return None if wake is None else max(0.0, wake - now)

    def _step(self, hungry: list[Attached]) -> None:
        """Of sessions with something worth reading, best first."""
        packer = self._engine.packer()
        rows, prompt_budget = self._rows, self._prompt_budget
        share = max(1, min(self._rows_per_session, rows // len(hungry)))
        planned: list[Attached] = []
        try:
            for attached in hungry:
                session = attached.session
                if session.unread_text:
                    if prompt_budget > 0:
                        planned.append(attached)
                        prompt_budget -= session.plan_text(packer, prompt_budget)
                elif rows > 0:
                    planned.append(attached)
                    rows -= session.plan_nodes(packer, min(share, rows))
            logits = self._engine.forward(packer.pack())
        except Exception as error:  # nothing of the step counts; its sessions are tried again
            for attached in planned:
                attached.session.undo()
            self.step_failed(
                [attached.session for attached in planned], np.asarray(packer.slots, dtype=np.int64), error
            )
            return
        self.steps += 1
        for attached in planned:
            self._retrial.forget(attached.session)
            try:
                attached.session.grow(logits)
            except Exception as error:  # one session's trouble is not the others'
                log.error("session_failed", exc_info=error)
                self.end_session(attached.session, error)

    def _send(self, now: float) -> float | None:
        """Push what is due; when the next push will be."""
        wake: float | None = None
        for attached in self._attached.values():
            session = attached.session
            if not attached.takes_more():
                wake = now + UNREAD_SECONDS if wake is None else min(wake, now + UNREAD_SECONDS)
                continue
            due = session.due(self._step_seconds)
            if due <= now:
                attached.emit(session.spell_unsent(now))
            elif due < math.inf:
                wake = due if wake is None else min(wake, due)
        return wake
