"""Eligibility: which drafters a session uses now, from its policy, its rule, the controller's mode, and the cost of a
candidate."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Protocol

from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from verifier_service.backend.result import FORCED, Decision, Mode, Without
from verifier_service.costs.token_budget import RowPrice
from verifier_service.sessions.session import VerifierSession
from verifier_service.speculation.controller import BatchProfile, Controllers

NOTHING_PAYS = 1.0 - 1e-7
"""Break-even probability at or above which no candidate pays: as a moving average it approaches 1 without reaching
it."""

LOCAL_MODELS: Mapping[CandidateSource, Mode] = {
    CandidateSource.LOCAL_MODEL: Mode.LOCAL_DRAFT,
    CandidateSource.HEADS: Mode.HEADS,
}
"""Drafters that need a model inside the verifier, each with the mode that uses it. A verifier may lack the model."""

WITHOUT_MODEL = OWN_DRAFTERS.difference(LOCAL_MODELS)
"""Drafters inside the verifier that need no model."""


class LocalModel(Protocol):
    """A model inside the verifier (local draft or heads), as far as eligibility depends on it."""

    works: bool
    drafter: CandidateSource

    def serves(self, session: VerifierSession) -> bool:
        """Return True if the model may propose candidates for the session, now or later."""


class Eligibility:
    """Decides which drafters a session may use, from the modes, `prefilling`, and the moving average of the break-even
    probability."""

    def __init__(self, controllers: Controllers, local_model: LocalModel | None) -> None:
        self.prefilling = False  # prompts use the CPU cores of drafts
        self.break_even = 0.0
        self._controllers = controllers
        self._local_model = local_model

    def observe_break_even(self, break_even: float, smoothing: float) -> None:
        """Update the moving average with a step's break-even probability, with weight `smoothing`."""
        self.break_even += smoothing * (min(break_even, 1.0) - self.break_even)

    def uses_remote_draft(self, session: VerifierSession) -> bool:
        """Return True if the session's remote draft should propose candidates. CONTRASTIVE always needs them."""
        if not session.policy.remote:
            return False
        if _always_uses_draft(session):
            return True
        if self.prefilling or self.break_even >= NOTHING_PAYS or not session.draft_gain.helps:
            return False
        return self._controllers.of(session).mode is Mode.REMOTE_DRAFT

    def lacks_remote_draft(self, session: VerifierSession) -> bool:
        """Return True if the session's remote draft is late: it is in use, but there is no candidate for the next
        token. False under CONTRASTIVE, where the session waits for its draft."""
        return not session.needs_draft and self.uses_remote_draft(session) and not session.has_draft_candidates

    def uses_proposers(self, session: VerifierSession) -> bool:
        """Return True if the session may have candidates of the verifier's own proposers."""
        return session.takes_own_candidates and (
            is_exempt(session) or self._controllers.of(session).mode is not Mode.OFF
        )

    def uses_local_model(self, session: VerifierSession) -> bool:
        """Return True if the local model proposes for the session. A request for a lookahead window excludes the local
        model."""
        policy = session.policy
        if not (session.takes_own_candidates and self._may_use_local_model(session) and policy.lookahead is None):
            return False
        if not policy.forced and self._controllers.of(session).mode not in LOCAL_MODELS.values():
            return False
        assert self._local_model is not None
        return self._local_model.serves(session)

    def decision(self, session: VerifierSession, without: Without | None = None) -> Decision:
        """Return the decision on a step of the session. `without`: why it has no candidates; None: it has some."""
        return Decision(self._mode_name(session), without)

    def row_cost(self, session: VerifierSession, price: RowPrice) -> Decision:
        """Return the decision on a session's step that has no candidates because of the price of a row."""
        best = session.candidates().logprobs
        expected = math.exp(best[0]) if best else 0.0
        return Decision(self._mode_name(session), Without.ROW_COST, price.seconds, min(price.break_even, 1.0), expected)

    def why_plain(self, session: VerifierSession) -> Without:
        """Return why a session uses neither a remote draft nor proposers."""
        if not session.speculates:
            return session.policy.why_none
        if (why := self._why_no_model(session)) is not None:
            return why
        by_mode = self._or_probed(session, Without.PLAIN_FASTER)
        if not session.policy.remote or session.takes_own_candidates:
            return by_mode  # proposers cost nothing but rows: only the mode excludes them
        if not session.draft_gain.helps:
            return Without.DRAFT_GAINS_NOTHING
        if self._controllers.of(session).mode is not Mode.REMOTE_DRAFT:
            return by_mode
        return Without.PROMPTS_FIRST if self.prefilling else Without.ROW_COST

    def _or_probed(self, session: VerifierSession, measured: Without) -> Without:
        """Return the reason why a session's mode excludes its drafters: `measured`, or that the mode is probed."""
        return Without.PROBED if self._controllers.of(session).probing else measured

    def why_nothing(self, session: VerifierSession) -> Without:
        """Return why a session that uses drafters has no candidate."""
        return self._why_no_model(session) or Without.NOTHING_PROPOSED

    def _why_no_model(self, session: VerifierSession) -> Without | None:
        """For a session that permits only models inside the verifier, return why none of them proposes. None if one
        does, or if the session permits another drafter."""
        drafters = session.policy.drafters
        if not (session.takes_own_candidates and drafters <= LOCAL_MODELS.keys()):
            return None
        model = self._local_model
        if model is None or model.drafter not in drafters:
            return Without.HEADS_NOT_LOADED if CandidateSource.HEADS in drafters else Without.LOCAL_MODEL_NOT_LOADED
        by_heads = model.drafter is CandidateSource.HEADS
        if not model.works:
            return Without.HEADS_FAILED if by_heads else Without.LOCAL_MODEL_FAILED
        if not session.policy.forced and self._controllers.of(session).mode not in LOCAL_MODELS.values():
            return self._or_probed(session, Without.HEADS_SLOWER if by_heads else Without.LOCAL_MODEL_SLOWER)
        return None

    def _mode_name(self, session: VerifierSession) -> str:
        return FORCED if is_exempt(session) else self._mode_of(session)

    def _mode_of(self, session: VerifierSession) -> Mode:
        """Return the mode that governs a session, limited to the drafters that the session permits."""
        if not session.speculates:
            return Mode.OFF
        mode = self._controllers.of(session).mode
        if mode is Mode.REMOTE_DRAFT and session.policy.remote:
            return mode
        if mode in LOCAL_MODELS.values() and session.takes_own_candidates and self._may_use_local_model(session):
            return mode
        # Otherwise only proposers that need no model remain, if the session has any.
        without_model = session.grammar is not None or not session.policy.drafters.isdisjoint(WITHOUT_MODEL)
        lookups = mode is not Mode.OFF and session.takes_own_candidates and without_model
        return Mode.NGRAM if lookups else Mode.OFF

    def profile(self, sessions: Sequence[VerifierSession], beside: int = 0) -> BatchProfile | None:
        """Return the batch profile of the sessions with a common mode in a step that has `beside` other sessions. None
        if no session governed by the mode may speculate."""
        led = [session for session in sessions if not is_exempt(session)]
        if not any(session.speculates for session in led):
            return None
        return BatchProfile(
            len(led),
            remote_draft=any(session.policy.remote and session.draft_gain.helps for session in led),
            ngram=any(session.takes_own_candidates for session in led),
            sampled=2 * sum(not session.request.sampler.sampling.greedy for session in led) > len(led),
            local_model=self._local_mode if any(map(self._may_use_local_model, led)) else None,
            exempt=len(sessions) - len(led) + beside,
        )

    def would_draft(self, session: VerifierSession, sessions: int) -> bool:
        """Return True if `sessions` sessions like this one would use remote drafts. Thread-safe."""
        batch = BatchProfile(
            sessions,
            session.policy.remote and session.draft_gain.helps,
            session.takes_own_candidates,
            not session.request.sampler.sampling.greedy,
            self._local_mode if self._may_use_local_model(session) else None,
        )
        mode = self._controllers.of(session).mode_for(batch, time.monotonic())
        return batch.remote_draft and mode is Mode.REMOTE_DRAFT

    @property
    def _local_mode(self) -> Mode | None:
        """The mode that uses the local model, if there is one."""
        return None if self._local_model is None else LOCAL_MODELS[self._local_model.drafter]

    def _may_use_local_model(self, session: VerifierSession) -> bool:
        model = self._local_model
        return model is not None and model.works and model.drafter in session.policy.drafters


def is_exempt(session: VerifierSession) -> bool:
    """Return True if the session speculates regardless of the controller."""
    return _always_uses_draft(session) or session.policy.lookahead is not None


def _always_uses_draft(session: VerifierSession) -> bool:
    """Return True if the session uses its draft regardless of the controller."""
    return session.policy.forced or session.needs_draft
