"""N-gram lookup: candidates without a forward pass, from earlier occurrences of the text's last tokens."""

from __future__ import annotations

from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer
from verifier_service.proposers.suffix_cache import SuffixCache
from verifier_service.sessions.session import VerifierSession


class LookupProposer(Proposer):
    """N-gram lookup for all sessions. A session keeps its own text (`ngram.py`); this object keeps `cached_tokens`
    tokens of each tenant's finished texts."""

    def __init__(self, cached_tokens: int) -> None:
        self._cache = SuffixCache(cached_tokens)

    def propose(self, step: ComingStep) -> ProposalStats:
        for session in step.proposed_for():
            session.propose_ngrams(step.break_even, self._cache.tokens_of(session.request.tenant))
        return NO_PROPOSALS

    def finished(self, session: VerifierSession) -> None:
        self._cache.add(session.request.tenant, session.tree.committed)
