"""The step loop: take what is ready from every session, run one forward pass, commit, again.

It runs in its own thread and owns every session. It never waits for the network: a session uses the
candidates that have arrived, and sits out steps only while its pace says that waiting pays.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import structlog

from specdec.engine.batch import KEY_BUCKET
from specdec.engine.engine import Engine
from specdec.engine.kv import NOWHERE, KVPool
from specdec.serving.worker import Worker
from verifier_service.session import Session, Verdict

log = structlog.get_logger()

SCRATCH_SLOTS = 512


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, and what one session waited before it."""

    forward: float
    step: float
    waited: float


@dataclass
class Attached:
    """A session and where its results go. `emit` is called from the loop's thread and must not block."""

    session: Session
    emit: Callable[[Verdict, StepTimes], None]
    fail: Callable[[Exception], None]
    waiting_since: float | None = None


class StepLoop(Worker):
    """`prompt_budget`: prompt tokens computed in one step at most, over all sessions; `run_ahead`: tokens
    a session may be ahead of what its client has read."""

    def __init__(self, engine: Engine, *, prompt_budget: int = 256, run_ahead: int = 256) -> None:
        super().__init__("step-loop")
        self.steps = 0
        self._engine = engine
        self._pool = KVPool(engine.capacity)
        self._scratch = self._pool.take(min(SCRATCH_SLOTS, engine.capacity // 8)).tolist()
        self._prompt_budget = prompt_budget
        self._run_ahead = run_ahead
        self._attached: dict[int, Attached] = {}  # in order of arrival
        self._step_time = 0.01  # seconds, moving average of T_v

    @property
    def slots_used(self) -> int:
        """Slots owned by sessions."""
        return self._pool.used - len(self._scratch)

    @property
    def slots_for_sessions(self) -> int:
        """What one session can have at most."""
        return (self._pool.capacity - 1 - len(self._scratch)) // KEY_BUCKET * KEY_BUCKET

    # --- actions: called in the loop's thread -----------------------------------------------------

    def attach(self, attached: Attached) -> None:
        """Give a session its memory; PoolFullError if there is none left."""
        session = attached.session
        # Whole buckets: a lane's padding then reads its own session's memory.
        session.slots = self._pool.take(-(-session.end // KEY_BUCKET) * KEY_BUCKET)
        session.pace.committed(session.tree.base, time.monotonic())
        self._attached[id(session)] = attached

    def detach(self, session: Session) -> None:
        if self._attached.pop(id(session), None) is not None:
            self._pool.give(session.slots)

    # --- the loop ---------------------------------------------------------------------------------

    def turn(self) -> float | None:
        now = time.monotonic()
        ready, wake = self._ready(now)
        if not ready:
            return None if wake is None else wake - now
        try:
            self._step(ready)
        except Exception as error:  # the step's sessions are lost, the loop is not
            log.error("step_failed", exc_info=error)
            for attached in ready:
                self.detach(attached.session)
                attached.fail(error)
        return 0.0

    def _quarantine(self, attached: Attached, error: Exception) -> None:
        """End a session that failed, and wipe its memory: a NaN in it would spread to whoever gets it next,
        masked or not."""
        log.error("session_failed", exc_info=error)
        slots = attached.session.slots
        self._engine.copy(np.full(len(slots), NOWHERE), slots)
        self.detach(attached.session)
        attached.fail(error)

    def _ready(self, now: float) -> tuple[list[Attached], float | None]:
        """Sessions to step now, and when the first of the others wants to be looked at again."""
        ready: list[Attached] = []
        wake: float | None = None
        for attached in self._attached.values():
            session = attached.session
            if session.tree.base - session.consumed > self._run_ahead:
                continue  # far ahead of its reader; `consumed` will wake the loop
            until = session.wait_until(now, self._step_time)
            if until is not None:
                wake = until if wake is None else min(wake, until)
                if attached.waiting_since is None:
                    attached.waiting_since = now
                continue
            ready.append(attached)
        return ready, wake

    def _step(self, ready: list[Attached]) -> None:
        start = time.monotonic()
        packer = self._engine.packer()
        scratch = list(self._scratch)
        prompt_budget = self._prompt_budget
        planned: list[Attached] = []
        for attached in ready:
            if prompt_budget <= 0 and attached.session.remaining_prompt:
                continue  # its turn comes: the loop serves in order of arrival
            before = attached.session.remaining_prompt
            attached.session.plan(packer, scratch, max(1, prompt_budget))
            prompt_budget -= before
            planned.append(attached)

        batch = packer.pack()
        forward_start = time.monotonic()
        logits = self._engine.forward(batch)
        forward_time = time.monotonic() - forward_start

        verdicts: list[tuple[Attached, Verdict]] = []
        moves: list[tuple[int, int]] = []
        for attached in planned:
            try:
                verdict, moved = attached.session.settle(logits)
            except Exception as error:  # one session's trouble is not the others'
                self._quarantine(attached, error)
                continue
            moves += moved
            if verdict is not None:
                verdicts.append((attached, verdict))
        if moves:
            self._engine.copy(np.asarray([m[0] for m in moves]), np.asarray([m[1] for m in moves]))

        end = time.monotonic()
        self.steps += 1
        if len(batch.tokens) <= 64 * len(planned):  # a step of decoding, not of prompts
            self._step_time += 0.1 * (end - start - self._step_time)
        for attached, verdict in verdicts:
            session = attached.session
            waited = 0.0 if attached.waiting_since is None else start - attached.waiting_since
            attached.waiting_since = None
            session.pace.committed(session.tree.base, end)
            if verdict.finish:
                self.detach(session)
            attached.emit(verdict, StepTimes(forward_time, end - start, waited))
