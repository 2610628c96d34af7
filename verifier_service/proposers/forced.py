"""Forced tokens: candidates without a model, from a text's grammar."""

from __future__ import annotations

import math

from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.tree import Paths
from verifier_service.backend.result import GRAMMAR
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer
from verifier_service.sessions.session import VerifierSession

MAX_FORCED_TOKENS = 32
"""Maximum forced tokens in one step."""

LOGPROB = math.log(0.95)
"""Log-probability of a forced token: its bytes are certain, and models nearly always tokenize them as the tokenizer
does."""


class ForcedTokens(Proposer):
    """Proposes the tokens forced by grammars, once for each length of a text."""

    def __init__(self) -> None:
        self._proposed: dict[VerifierSession, int] = {}  # text length at the last proposal

    def propose(self, step: ComingStep) -> ProposalStats:
        for session in step.proposed_for():
            if session.grammar is None or self._proposed.get(session) == session.tree.base:
                continue
            self._proposed[session] = session.tree.base
            if not (tokens := session.forced()[:MAX_FORCED_TOKENS]):
                continue
            sampled = enumerate(tokens) if session.samples_candidates else ()
            rows = [(place, DraftDistribution.certain(token)) for place, token in sampled]
            session.add_candidates(Paths(tokens, range(len(tokens)), [LOGPROB] * len(tokens), rows), GRAMMAR)
        return NO_PROPOSALS

    def forget(self, session: VerifierSession) -> None:
        self._proposed.pop(session, None)
