"""A language model as a drafter: one forward pass expands the most probable nodes of all sessions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import structlog

from draft_service.drafter import Drafter, ExpansionError
from draft_service.model_session import ModelSession
from draft_service.session import RootMove, Session
from specdec.decoding.sampling import Rule
from specdec.engine.engine import Engine
from specdec.engine.kv.slots import KVPool
from specdec.engine.probe import EngineProbe

log = structlog.get_logger()

PAUSED_LAG_TOKENS = 512
"""Most committed tokens that a paused draft leaves pending: short texts cost other sessions nothing, and when it is
wanted again it catches up in one step."""


class LanguageModelDrafter(Drafter):
    """The drafter that runs a draft model.

    One pass computes at most `rows` nodes over all sessions, at most `rows_per_session` of one session, and at most
    `prompt_budget` tokens of committed text over all sessions."""

    rules = frozenset(Rule)

    def __init__(self, engine: Engine, *, rows: int = 16, rows_per_session: int = 4, prompt_budget: int = 512) -> None:
        self.engine = engine
        self._pool = KVPool(engine.capacity)
        self._rows = rows
        self._rows_per_session = rows_per_session
        self._prompt_budget = prompt_budget
        self._sessions: dict[Session, ModelSession] = {}
        self._probe = EngineProbe(engine)

    @property
    def slots(self) -> int:
        return self._pool.capacity - 1  # one is for padding

    @property
    def slots_used(self) -> int:
        return self._pool.used

    def open(self, session: Session) -> None:
        self._sessions[session] = ModelSession(session, self._pool.take(session.end + session.max_nodes))

    def commit(self, session: Session, move: RootMove) -> None:
        self._sessions[session].commit(move)

    def close(self, session: Session) -> None:
        self._pool.give(self._sessions.pop(session).slots.all)

    def best_logprob(self, session: Session) -> float:
        """Return what the base class does; 0 if a paused session has fallen too far behind its text."""
        if session.policy.paused and not session.over:
            return 0.0 if self._sessions[session].pending_text > PAUSED_LAG_TOKENS else -math.inf
        return session.best_logprob()

    def expand(self, sessions: Sequence[Session]) -> Mapping[Session, Exception]:
        packer = self.engine.packer()
        rows, prompt_budget = self._rows, self._prompt_budget
        share = max(1, min(self._rows_per_session, rows // len(sessions)))
        planned: list[ModelSession] = []
        try:
            for each in (self._sessions[session] for session in sessions):
                if each.pending_text:
                    if prompt_budget > 0:
                        planned.append(each)
                        prompt_budget -= each.plan_text(packer, prompt_budget)
                elif rows > 0:
                    planned.append(each)
                    rows -= each.plan_nodes(packer, min(share, rows))
            logits = self.engine.forward(packer.pack())
        except Exception as error:  # nothing of the pass counts; its sessions are tried again
            self._probe.pass_failed(packer.slots)
            for each in planned:
                each.undo_plan()
            raise ExpansionError([each.session for each in planned], error) from error
        failed: dict[Session, Exception] = {}
        for each in planned:
            try:
                each.expand(logits)
            except Exception as error:  # one session's error does not end the others
                failed[each.session] = error
        return failed

    def recover(self) -> bool:
        return self._probe.recovers()
