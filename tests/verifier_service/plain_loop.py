"""The step loop without speculation, one token per session and step: it specifies the output of `StepLoop`.

No candidates, modes, delay, windows or coalesced commits: only admission, one packed forward pass and the sampler's
choice. Under COUPLED, speculation must not change these tokens; tests compare the two loops.
"""

from __future__ import annotations

import time

from specdec.engine.engine import Engine, launch_of
from specdec.engine.kv.blocks import BLOCK, BlockPool
from specdec.engine.probe import EngineProbe
from specdec.serving.engine_worker import EngineWorker
from verifier_service.backend.result import CommitDetails, StepSeconds
from verifier_service.backend.stats import VerifierStats
from verifier_service.scheduling.run_queue import RunQueue
from verifier_service.sessions.running_session import RunningSession
from verifier_service.sessions.session import VerifierSession
from verifier_service.verification.verified_step import verify_step


class PlainLoop(EngineWorker[VerifierSession]):
    """A verifier's loop with the part of `StepLoop`'s interface that tests use; it is no `SessionBackend`. `step_rows`:
    limit on prompt tokens of one session in a step."""

    def __init__(self, engine: Engine, *, step_rows: int = 512, max_unread_tokens: int = 256) -> None:
        super().__init__("plain-loop")
        self._engine = engine
        self._probe = EngineProbe(engine)
        self.stats = VerifierStats()
        self.pool = BlockPool(engine.capacity // BLOCK)
        self._launch = launch_of(engine)
        self._step_rows = step_rows
        self._queue = RunQueue(engine, self.pool, self.stats, max_unread_tokens, lambda _: None)

    @property
    def context(self) -> int:
        """Maximum tokens of memory for one session."""
        return self.pool.usable * BLOCK

    def enqueue(self, entry: RunningSession) -> None:
        """Queue a session for memory; EngineLostError if the engine is lost."""
        self.check_works()
        self._queue.add(entry)

    def detach(self, session: VerifierSession) -> None:
        """Forget a session in any state and free its memory."""
        self._queue.remove(session)
        self._retry.forget(session)

    def step(self) -> float | None:
        self._queue.admit()
        ready = [e for e in self._queue.running if e.session.computable and not self._queue.throttled(e)]
        if (retried := self._retry.next([entry.session for entry in ready])) is not None:
            ready = [entry for entry in ready if entry.session is retried]
        ready = self._queue.reserve_texts(ready)
        if not ready:
            return None
        start, packer = time.monotonic(), self._engine.packer()
        planned = [(e, e.session.plan(packer, min(self._step_rows, e.session.computable), [], [])) for e in ready]
        rows = len(packer.tokens)  # without padding
        try:
            verified = verify_step(planned, self._launch(packer.pack()), start)
        except Exception as error:
            self._probe.pass_failed(packer.slots)
            self.step_failed([entry.session for entry in ready], error)
            return 0.0
        self.step_succeeded(entry.session for entry in ready)
        now = time.monotonic()
        results = verified.commit(now)
        for entry, why in verified.failed:
            self._end(entry, why)
        for entry, scores in verified.scores:
            for part in scores.parts():
                entry.responses.send(entry.response_maker.scores(part))
        seconds = StepSeconds(verified.forward_seconds, now - start)
        for entry, result in results:
            entry.responses.send(entry.response_maker.commit(result, CommitDetails(*seconds, entry.queued)))
            if result.finish:
                self._queue.lengths.add(entry.session.generated)
                self.detach(entry.session)
        for entry, query in verified.draft_queries:
            entry.responses.send(entry.response_maker.query(query))
        self.stats.observe(rows, seconds, [result for _, result in results])
        return 0.0

    def recover(self) -> bool:
        return self._probe.recovers()

    def end_session(self, session: VerifierSession, error: Exception) -> None:
        (entry,) = (entry for entry in self._queue.all if entry.session is session)
        self._end(entry, error)

    def end_sessions(self, error: Exception) -> None:
        for entry in self._queue.all:
            self._end(entry, error)
        self.pool.forget_prefixes()

    def _end(self, entry: RunningSession, error: Exception) -> None:
        self._queue.remove(entry.session, wipe=True)
        entry.responses.send(error)
