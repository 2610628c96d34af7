"""A session in the step loop: its response queue and its state there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from verifier_service.backend.result import StepTimes, VerifyResult
from verifier_service.backend.stats import VerifierStats
from verifier_service.sessions.session import Session


@dataclass(eq=False)
class RunningSession:
    """A session in the step loop, whose thread owns it. `message` makes a response of a verify result and its times,
    on the response queue's event loop."""

    session: Session
    responses: ResponseQueue[Any]
    message: Callable[[VerifyResult, StepTimes], Any]
    arrival: int = 0
    preemptions: int = 0
    waiting_since: float = 0.0  # for memory
    queued: float = 0.0  # seconds that it has waited for memory since its last commit was sent
    pending_result: VerifyResult | None = None  # of the steps since a commit was last sent
    last_sent_at: float = 0.0  # when a verify result was last sent
    drafting_wanted: bool = False  # as was sent with it
    admitted_at: float = 0.0  # when it last got memory
    had_memory: float = 0.0  # seconds for which it has had memory, before it last lost it
    cost: float = 0.0  # tokens that its tenant was charged for it, each at its cost
    awaiting_draft: bool = False  # it has a draft, and its last step is not counted in `draft_ready_steps` yet
    timeline: Timeline = field(default_factory=Timeline)
    last_step: int = 0  # number of the step that it last took part in; 0: of none
    grammar: float = 0.0  # seconds that its grammar takes in a step, moving average
    proposing: float = 0.0  # seconds that proposers take for it before a step, moving average
    computing_prompt: bool = False  # it has memory, and no step has chosen a token of it since

    def count_draft_ready(self, stats: VerifierStats) -> None:
        """Count whether the draft's next candidates came while the last step was under way: the coming step has not
        been delayed yet. For sessions that are `awaiting_draft`."""
        stats.drafted_steps += 1
        stats.draft_ready_steps += self.session.has_draft_candidates
        self.awaiting_draft = False

    @property
    def tenant(self) -> str:
        return self.session.request.tenant

    @property
    def beside(self) -> float:
        """Seconds that it costs a step besides its rows."""
        return self.grammar + self.proposing

    @property
    def weight(self) -> float:
        """Share of its tenant, relative to others."""
        return self.session.request.weight

    @property
    def precedence(self) -> tuple[bool, int, int]:
        """The key that waiting sessions of a tenant are sorted by: preempted ones before new ones, then by priority,
        then in order of arrival."""
        return (not self.preemptions, self.session.request.priority, self.arrival)
