"""A session in the step loop: where its results go, and how it fares there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.serving.response_queue import ResponseQueue
from verifier_service.session import Session
from verifier_service.verification.result import VerifyResult


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step, and what one session went through before it."""

    forward: float
    step: float
    waited: float  # for candidates
    queued: float  # for memory, since its last commit
    cached: int = 0  # on the first commit: tokens that were in memory already
    preemptions: int = 0  # so far
    drafting_wanted: bool = False  # a draft's candidates for this session are used now
    min_candidate_probability: float = 0.0  # from which a candidate pays
    drafted: int = 0  # sessions of the pod for which there is a draft
    round_trip: float = 0.0  # to this session's draft and back; 0: unknown


@dataclass(eq=False)
class RunningSession:
    """Owned by the loop's thread; `message` runs on the outbox's event loop."""

    session: Session
    responses: ResponseQueue[Any]
    message: Callable[[VerifyResult, StepTimes], Any]
    arrival: int = 0
    preemptions: int = 0
    waiting_since: float = 0.0  # for memory
    queued: float = 0.0  # seconds
    pending_result: VerifyResult | None = None  # of the last steps
    last_sent_at: float = 0.0  # when a verdict was last told
    drafting_wanted: bool = False  # as was said with it
    admitted_at: float = 0.0  # when it got its memory
    awaiting_draft: bool = False  # a step of it, which has a draft, has ended since it was last looked at

    @property
    def precedence(self) -> tuple[bool, int]:
        """Who has been preempted goes before all who are new; then in order of arrival."""
        return (not self.preemptions, self.arrival)
