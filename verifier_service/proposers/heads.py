"""What reads the target's own states: heads, which guess from them between two steps, and the features for drafts.

Under COUPLED, guesses are ranked with the noise of their position, as the target would rank them if it had the heads'
logits. Under REJECTION each position has one candidate, drawn with certainty.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import structlog

from specdec.decoding.calibration import Calibration, Calibrations
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.speculation import CandidateSource
from specdec.decoding.tree import Paths
from specdec.engine.engine import Engine, Launch
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats, Proposer
from verifier_service.proposers.usefulness import Usefulness
from verifier_service.sessions.session import VerifierSession
from verifier_service.sessions.step_rows import ScheduledRows
from verifier_service.settings.tuning import DraftModelTuning
from verifier_service.verification.tree_verification import TreeVerification

log = structlog.get_logger()

State = TypeVar("State")


class StateReader(Proposer, Generic[State]):
    """Keeps something of each text, made from the target's states at its rows. Owned by the step loop's thread. After a
    failure it is not used again; no token is lost."""

    failure: ClassVar[str]  # log event

    def __init__(self) -> None:
        self.works = True
        self._texts: dict[VerifierSession, State] = {}

    @abstractmethod
    def launch_of(self, engine: Engine) -> Launch:
        """Return the function that launches the target's passes with the states to read."""

    @abstractmethod
    def _reads(self, session: VerifierSession) -> bool:
        """Return whether to read the states of a session's rows."""

    def forget(self, session: VerifierSession) -> None:
        self._texts.pop(session, None)

    @contextmanager
    def _failing_alone(self) -> Iterator[None]:
        """Stop reading on an error, without failing the step."""
        try:
            yield
        except Exception as error:
            log.error(self.failure, exc_info=error)
            self.works = False
            for session in list(self._texts):
                self.forget(session)

    def _continuing(self, verifications: Sequence[TreeVerification]) -> list[TreeVerification]:
        """Return the verifications of texts that go on and are read."""
        return [
            verification
            for verification in verifications
            if verification.error is None and not verification.result.finish and self._reads(verification.session)
        ]


@dataclass
class HeadsText:
    """A proposer's state for one text."""

    sampler: RequestSampler  # of the queries that rank guesses
    calibration: Calibration
    usefulness: Usefulness
    length: int = 0  # length of the text at the last state received
    proposed: int = 0  # length of the text at the last proposal


Text = TypeVar("Text", bound=HeadsText)

NewText = Callable[[RequestSampler, Calibration, Usefulness], Text]
"""Makes the state for a text."""


class HeadsProposer(StateReader[Text]):
    """Heads of a verifier."""

    failure = "heads_failed"
    phase = Phase.AFTER_DELAY
    drafter = CandidateSource.HEADS

    def __init__(self, new_text: NewText[Text], tuning: DraftModelTuning) -> None:
        super().__init__()
        self._tuning = tuning
        self._new_text = new_text
        self._calibrations = Calibrations()

    @abstractmethod
    def _propose(self, asked: Sequence[tuple[VerifierSession, Text]], step: ComingStep) -> None:
        """Add candidates to the trees of these sessions (at least one)."""

    def serves(self, session: VerifierSession) -> bool:
        """Return True if the heads may propose candidates for a session, now or later."""
        return self.works

    def propose(self, step: ComingStep) -> ProposalStats:
        begin = time.monotonic()
        asked = [
            (session, text)
            for session in step.decoding
            if step.eligibility.uses_local_model(session)
            and (text := self._texts.get(session)) is not None
            and text.length == session.tree.base
            and text.proposed != session.tree.base
            and session.best_nodes.expected - 1.0 < text.usefulness.expected_accepted
        ]
        if not asked:
            return NO_PROPOSALS
        with self._failing_alone():
            self._propose(asked, step)
        return ProposalStats(time.monotonic() - begin, len(asked))

    def _reads(self, session: VerifierSession) -> bool:
        """Return True if the heads may propose for the session, now or in another mode."""
        return self.works and self.drafter in session.policy.drafters and session.takes_own_candidates

    def _text_of(self, session: VerifierSession) -> Text:
        text = self._texts.get(session)
        if text is None:
            request = session.request
            text = self._texts[session] = self._new_text(
                _greedy(request.sampler) if session.samples_candidates else request.sampler,
                self._calibrations.of(request.sampler, request.tenant),
                Usefulness(self._tuning),
            )
        return text


def rows_before_root(
    session: VerifierSession, planned: ScheduledRows, context: int, length: int
) -> tuple[int, Sequence[int]]:
    """Return a session's rows of committed tokens in a step, without the root's and without rows more than `context`
    tokens before `length`: the position of the first row, and the places of all in the batch."""
    count = planned.count - (planned.root_row is not None)
    skipped = min(max(0, length - context - session.computed), count)
    return session.computed + skipped, range(planned.first_row + skipped, planned.first_row + count)


def certain(paths: Paths) -> Paths:
    """Return these paths (one candidate at each place), marked as drawn with certainty (REJECTION)."""
    placed = zip(paths.parents, paths.tokens, strict=True)
    return paths._replace(distributions=[(place, DraftDistribution.certain(token)) for place, token in placed])


def _greedy(sampler: RequestSampler) -> RequestSampler:
    """Return the sampler that ranks by the logits alone."""
    return replace(sampler, sampling=replace(sampler.sampling, temperature=0.0))
