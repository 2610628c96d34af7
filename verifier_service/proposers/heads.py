"""Heads in the verifier: the common part of proposers that guess from the target's own states between two steps.

Under COUPLED, guesses are ranked with the noise of their position, as the target would rank them if it had the heads'
logits. Under REJECTION each position has one candidate, whose draft probability counts as 1.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from specdec.decoding.calibration import Calibration, Calibrations
from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.query import RequestSampler
from specdec.decoding.speculation import CandidateSource
from specdec.decoding.tree import Paths
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, Phase, ProposalStats
from verifier_service.proposers.state_reader import StateReader
from verifier_service.proposers.usefulness import Usefulness
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DraftModelTuning


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
        """Return whether the heads work; they serve every session."""
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
            and session.best_nodes.expected_accepted < text.usefulness.expected_accepted
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


def certain(paths: Paths) -> Paths:
    """Return these paths (one candidate at each place), marked as drawn with certainty (REJECTION)."""
    placed = zip(paths.parents, paths.tokens, strict=True)
    return paths._replace(distributions=[(place, DraftDistribution.certain(token)) for place, token in placed])


def _greedy(sampler: RequestSampler) -> RequestSampler:
    """Return the sampler that ranks by the logits alone."""
    return replace(sampler, sampling=replace(sampler.sampling, temperature=0.0))
