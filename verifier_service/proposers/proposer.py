"""The seam for drafters inside the verifier: a proposer adds candidates to the token trees of sessions.

A new drafter is one file with a subclass of `Proposer`, and an entry in the step loop's list. CONTRIBUTING.md lists the
further changes for a drafter that requests can name, or that has its own token source. A proposer only suggests tokens
that may follow a text: the token budget chooses the candidates to verify, and the speculation controller decides
whether proposers are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from verifier_service.costs.step_latency import StepLatency
from verifier_service.sessions.session import VerifierSession
from verifier_service.speculation.eligibility import Eligibility

if TYPE_CHECKING:
    from specdec.decoding.step_logits import StepLogits
    from verifier_service.verification.tree_verification import Prompts, TreeVerification


class Phase(Enum):
    """The time at which a proposer runs."""

    BEFORE_DELAY = "before_delay"
    """Before the decision on the step delay, which its candidates influence. The proposer may be called again before
    the step begins, so it must be fast and skip sessions already served."""
    AFTER_DELAY = "after_delay"
    """Once, just before the step begins. The proposer may take time, which enters the break-even probability of
    candidates."""


class ProposalStats(NamedTuple):
    """The work of proposers before a step."""

    seconds: float = 0.0  # charged to the step
    sessions: int = 0  # with proposals


NO_PROPOSALS = ProposalStats()


@dataclass(frozen=True)
class ComingStep:
    """The step that proposers work for."""

    sessions: Sequence[VerifierSession]  # the ready ones
    eligibility: Eligibility
    latency: StepLatency
    break_even: float  # probability

    @property
    def decoding(self) -> list[VerifierSession]:
        """Sessions with a computed prompt."""
        return [session for session in self.sessions if not session.remaining_prompt]

    def proposed_for(self) -> Iterator[VerifierSession]:
        """Yield the decoding sessions that use proposers, except sessions with sampled candidates (REJECTION) that use
        a local model: each place takes only one candidate, and the local model has precedence."""
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
        """Add candidates to the trees of the step's sessions (`VerifierSession.add_candidates`)."""

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:  # noqa: B027
        """Learn from a verified step, before its tokens are committed. The logits are dropped after the call."""

    def observe_prompts(self, prompts: Prompts, logits: StepLogits) -> None:  # noqa: B027
        """Learn from a verified step's prompt rows that choose no token, before they count as computed."""

    def forget(self, session: VerifierSession) -> None:  # noqa: B027 -- most proposers keep nothing
        """Free the state of a session that left or was preempted; it may come back."""

    def finished(self, session: VerifierSession) -> None:  # noqa: B027 -- most proposers learn nothing
        """Learn from a complete text."""
