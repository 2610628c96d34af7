"""N-gram lookup: tokens that followed the same n-gram in a text, its lookahead windows or its tenant's last texts."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from specdec.decoding.ngrams import Tokens
from specdec.decoding.step_logits import StepLogits
from verifier_service.proposers.proposer import NO_PROPOSALS, ComingStep, ProposalStats, Proposer
from verifier_service.sessions.session import VerifierSession
from verifier_service.verification.tree_verification import TreeVerification

MAX_TENANTS = 64
"""Maximum tenants with kept texts; the least recently active one is forgotten first."""

BREAK = -1
"""Separator of two texts: not a token id, so that no lookup continues across it."""


class LookupProposer(Proposer):
    """N-gram lookup for all sessions. A session keeps its own text (`SessionNgrams`); this object keeps `cached_tokens`
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


class SuffixCache:
    """The suffix cache: the last `most` tokens of each tenant's finished texts.

    Off by default, since it holds other users' text. No text can leak through it: a proposal is accepted only if it is
    the target's own choice. But response times can reveal that a text was generated before. So, as in the prefix cache,
    texts are shared within a tenant only.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._texts: OrderedDict[str, _Recent] = OrderedDict()

    def add(self, tenant: str, text: Sequence[int]) -> None:
        """Add a finished text."""
        if not self._most:
            return
        recent = self._texts.get(tenant)
        if recent is None:
            recent = self._texts[tenant] = _Recent(self._most)
        self._texts.move_to_end(tenant)
        recent.add([BREAK, *text[max(0, len(text) + 1 - self._most) :]])
        if len(self._texts) > MAX_TENANTS:
            self._texts.popitem(last=False)

    def tokens_of(self, tenant: str) -> Tokens | None:
        """Return a view of a tenant's texts, the latest last; None if there are none."""
        recent = self._texts.get(tenant)
        return None if recent is None else recent.tokens


class _Recent:
    """A contiguous buffer of the last `most` tokens added."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._buffer = np.empty(2 * most, dtype=np.int32)
        self._end = 0

    @property
    def tokens(self) -> Tokens:
        return self._buffer[max(0, self._end - self._most) : self._end]

    def add(self, tokens: Sequence[int]) -> None:
        """Append at most `most` tokens."""
        if self._end + len(tokens) > len(self._buffer):
            kept = self.tokens.copy()
            self._buffer[: len(kept)] = kept
            self._end = len(kept)
        self._buffer[self._end : self._end + len(tokens)] = tokens
        self._end += len(tokens)
