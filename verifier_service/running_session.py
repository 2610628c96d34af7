"""A session in the step loop: its response queue, its state there, and the times of its steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specdec.serving.response_queue import ResponseQueue
from verifier_service.session import Session
from verifier_service.verification.result import VerifyResult


@dataclass(frozen=True)
class StepTimes:
    """Times of one step, in seconds, and what a session's commit tells besides its verify result."""

    forward: float
    step: float
    waited: float  # step delay, for candidates
    queued: float  # for memory, since its last commit
    cached: int = 0  # on the first commit: tokens that were in memory already
    preemptions: int = 0  # of the session so far
    drafting_wanted: bool = False  # a draft's candidates for this session are used now
    min_candidate_probability: float = 0.0  # the break-even probability
    drafted: int = 0  # sessions of the pod for which there is a draft
    round_trip: float = 0.0  # to the session's draft and back; 0: unknown


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
    awaiting_draft: bool = False  # it has a draft, and its last step is not counted in `draft_ready_steps` yet

    @property
    def precedence(self) -> tuple[bool, int]:
        """The key that waiting sessions are sorted by: preempted ones before new ones, then in order of arrival."""
        return (not self.preemptions, self.arrival)
