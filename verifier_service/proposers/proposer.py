"""The seam for drafters inside the verifier: a proposer puts candidates into the token trees of sessions.

A new drafter is a file of its own that derives from `Proposer`, and an entry in the step loop's list. It decides only
what may follow a text: which candidates a step verifies is the token budget's choice, and whether proposers are used at
all the speculation controller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.session import Session
from verifier_service.speculation.eligibility import Eligibility


class Phase(Enum):
    """When a proposer acts."""

    BEFORE_DELAY = "before_delay"
    """Before the loop decides whether to delay the step: its candidates count in that decision. It may be asked again
    before the step begins, so it has to be quick, and to notice that it has proposed already."""
    AFTER_DELAY = "after_delay"
    """Once, when the step is about to begin: it may take time, which enters the price of candidates."""


class ProposalStats(NamedTuple):
    """The work of proposers before a step."""

    seconds: float = 0.0  # spent, to be paid by the step
    sessions: int = 0  # with proposals


NO_PROPOSALS = ProposalStats()


@dataclass(frozen=True)
class ComingStep:
    """The step that proposers work for."""

    sessions: Sequence[Session]  # those that are ready
    eligibility: Eligibility
    latency: StepLatency
    price: float  # the break-even probability

    @property
    def decoding(self) -> list[Session]:
        """Sessions whose prompt is computed."""
        return [session for session in self.sessions if not session.remaining_prompt]

    def proposed_for(self) -> Iterator[Session]:
        """Yield the decoding sessions that use proposers. Where a place takes one candidate, which is sampled, the
        local model has it if it is used."""
        for session in self.sessions:
            if session.remaining_prompt or not self.eligibility.uses_proposers(session):
                continue
            if not (session.samples_candidates and self.eligibility.uses_local_model(session)):
                yield session


class Proposer(ABC):
    """A drafter inside the verifier, called by the step loop's thread."""

    phase = Phase.BEFORE_DELAY

    @abstractmethod
    def propose(self, step: ComingStep) -> ProposalStats:
        """Put candidates into the trees of the step's sessions (`Session.add_candidates`)."""

    def forget(self, session: Session) -> None:  # noqa: B027 -- most proposers keep nothing
        """Free what is kept for a session, which has left or has lost its memory; it may come back."""

    def finished(self, session: Session) -> None:  # noqa: B027 -- most proposers learn nothing
        """Learn from a text that is complete."""
