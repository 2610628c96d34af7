"""N-gram lookup: tokens that followed the same n-gram in a text, its lookahead windows or its tenant's last texts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from specdec.decoding.step_logits import StepLogits
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer
from verifier_service.proposers.suffix_cache import SuffixCache
from verifier_service.sessions.session import VerifierSession
from verifier_service.verification.tree_verification import TreeVerification


class LookupProposer(Proposer):
    """N-gram lookup for all sessions. A session keeps its own text (`ngram.py`); this object keeps `cached_tokens`
    tokens of each tenant's finished texts, except texts with a cache salt, and except draws under REJECTION: a request
    with the same seed would meet its own tokens as candidates, and the draw after a rejected candidate would use the
    random number that had chosen it."""

    def __init__(self, cached_tokens: int) -> None:
        self._cache = SuffixCache(cached_tokens)

    def propose(self, step: ComingStep) -> ProposalStats:
        for session in step.proposed_for():
            salted = session.request.cache_salt
            session.propose_ngrams(step.break_even, None if salted else self._cache.tokens_of(session.request.tenant))
        return NO_PROPOSALS

    def observe(self, verifications: Sequence[TreeVerification], logits: StepLogits) -> None:
        """Update the windows of a step with the target's choices after their rows."""
        with_window = [
            verification
            for verification in verifications
            if verification.error is None and verification.lookahead_count
        ]
        if not with_window:
            return
        rows, queries = zip(
            *(pair for verification in with_window for pair in verification.lookahead_queries()), strict=True
        )
        chosen = iter(logits.choose(rows, queries)[0].tolist())
        for verification in with_window:
            verification.session.ngrams.observe_window(
                list(itertools.islice(chosen, verification.lookahead_count)), len(verification.result.tokens)
            )

    def finished(self, session: VerifierSession) -> None:
        drawn = session.samples_candidates and session.request.sampler.sampling.temperature > 0
        if not session.request.cache_salt and not drawn:
            self._cache.add(session.request.tenant, session.tree.committed)
