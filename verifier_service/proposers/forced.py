"""Candidates that cost no model: the tokens that a text's grammar forces."""

from __future__ import annotations

import math

from specdec.decoding.proposal import DraftDistribution
from specdec.decoding.tree import Paths
from verifier_service.backend.result import GRAMMAR
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer

LONGEST = 32
"""Most forced tokens in one step."""

LOGPROB = math.log(0.95)
"""Log-probability of a forced token: its bytes are certain, and models nearly always write them as the tokenizer
does."""


class ForcedTokens(Proposer):
    """Proposes what grammars force."""

    def propose(self, step: ComingStep) -> ProposalStats:
        for session in step.proposed_for():
            if session.grammar is None or not (tokens := session.grammar.forced()[:LONGEST]):
                continue
            sampled = enumerate(tokens) if session.samples_candidates else ()
            rows = [(place, DraftDistribution.certain(token)) for place, token in sampled]
            session.add_candidates(Paths(tokens, range(len(tokens)), [LOGPROB] * len(tokens), rows), GRAMMAR)
        return NO_PROPOSALS
