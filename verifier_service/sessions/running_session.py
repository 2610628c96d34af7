"""A session in the step loop: its response queue and its state there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from verifier_service.backend.result import VerifyResult
from verifier_service.backend.session_backend import ResponseMaker
from verifier_service.backend.stats import VerifierStats
from verifier_service.sessions.session import VerifierSession


@dataclass(eq=False)
class RunningSession:
    """A session in the step loop, owned by the loop's thread. `response_maker` makes the items of `responses`."""

    session: VerifierSession
    responses: ResponseQueue[Any]
    response_maker: ResponseMaker = field(default_factory=ResponseMaker)
    arrival: int = 0
    preemptions: int = 0
    waiting_since: float = 0.0  # for memory
    queued: float = 0.0  # seconds of waiting for memory since its last commit was sent
    pending_result: VerifyResult | None = None  # of the steps since its last commit was sent
    last_sent_at: float = 0.0  # time of its last commit
    drafting_wanted: bool = False  # value in its last commit
    sent_rates: Mapping[str, float] | None = None  # of modes, as last sent
    admitted_at: float = 0.0  # time of its last admission
    had_memory: float = 0.0  # total seconds it held memory, up to its last preemption
    cost: float = 0.0  # charged to its tenant, in prompt tokens
    draft_ready_uncounted: bool = False  # uses a draft; last step not counted in `draft_ready_steps` yet
    timeline: Timeline = field(default_factory=Timeline)
    last_step: int = 0  # number of its last step; 0: none
    usual_grammar_seconds: float = 0.0  # its grammar's seconds in a step, moving average
    usual_proposer_seconds: float = 0.0  # proposers' seconds for it before a step, moving average
    computing_prompt: bool = False  # admitted, no token chosen since

    def count_draft_ready(self, stats: VerifierStats) -> None:
        """Count whether the draft's next candidates arrived during the last step; called before the coming step can be
        delayed, for sessions that are `draft_ready_uncounted`."""
        stats.drafted_steps += 1
        stats.draft_ready_steps += self.session.has_draft_candidates
        self.draft_ready_uncounted = False

    @property
    def tenant(self) -> str:
        return self.session.request.tenant

    @property
    def beside(self) -> float:
        """Seconds it adds to a step besides its rows."""
        return self.usual_grammar_seconds + self.usual_proposer_seconds

    @property
    def weight(self) -> float:
        """Weight of its tenant, relative to others."""
        return self.session.request.weight

    @property
    def precedence(self) -> tuple[bool, int, int]:
        """Sort key among a tenant's waiting sessions: preempted before new, then by priority, then by arrival."""
        return (not self.preemptions, self.session.request.priority, self.arrival)
