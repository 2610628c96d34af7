"""Which sessions use a remote draft, by the recent cost of candidates."""

from __future__ import annotations

from typing import Any

from specdec.decoding.speculation import CandidateSource
from tests.verifier_service.fakes import Client, Decided, TextEngine, step_loop
from verifier_service.adaptive_speculation import AdaptiveSpeculation
from verifier_service.backend.request import Policy
from verifier_service.backend.result import Mode
from verifier_service.costs.step_latency import StepLatency
from verifier_service.scheduling.cpu_threads import FixedThreads
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.speculation.controller import Controllers
from verifier_service.speculation.eligibility import Eligibility

REMOTE = frozenset({CandidateSource.REMOTE})
LOCAL = frozenset({CandidateSource.LOCAL_MODEL})


class Serving:
    """A local model that may propose for every session."""

    works = True
    drafter = CandidateSource.LOCAL_MODEL

    def serves(self, session: VerifierSession) -> bool:
        return True


def test_no_draft_is_used_while_no_candidate_pays() -> None:
    """Drafts pause: no step waits for them, and no token counts as undrafted. Sessions with forced drafts keep them."""
    loop = step_loop(TextEngine(40))
    eligibility = Eligibility(Controllers(shared=Decided(Mode.REMOTE_DRAFT)), None)
    drafted = Client(loop, [3, 4], policy=Policy(REMOTE, 8, 0.0)).session
    forced = Client(loop, [3, 4], policy=Policy(REMOTE, 8, 0.0, forced=True)).session
    assert eligibility.uses_remote_draft(drafted)
    assert eligibility.lacks_remote_draft(drafted)
    for _ in range(100):
        eligibility.observe_break_even(1.5, smoothing=0.2)
    assert not eligibility.uses_remote_draft(drafted)
    assert not eligibility.lacks_remote_draft(drafted)
    assert eligibility.uses_remote_draft(forced)
    eligibility.observe_break_even(0.5, smoothing=0.2)
    assert eligibility.uses_remote_draft(drafted)


def test_a_forced_session_has_its_local_model_whatever_the_mode_is() -> None:
    loop = step_loop(TextEngine(40))
    eligibility = Eligibility(Controllers(shared=Decided(Mode.OFF)), Serving())
    adaptive, forced = (
        Client(loop, [3, 4], policy=Policy(LOCAL, 8, 0.0, forced=each)).session for each in (False, True)
    )
    plain = Client(loop, [3, 4], policy=Policy(REMOTE, 8, 0.0, forced=True)).session
    assert [eligibility.uses_local_model(session) for session in (adaptive, forced, plain)] == [False, True, False]


def test_what_a_local_draft_takes_is_charged_to_its_users() -> None:
    """Lookups before the step delay are charged to all users of proposers."""
    loop = step_loop(TextEngine(40))
    threads = FixedThreads(StepLatency((1, 2), [1.0, 2.0]))
    local_model: Any = Serving()
    speculation = AdaptiveSpeculation(
        Controllers(shared=Decided(Mode.OFF)), local_model, [], threads, DEFAULTS.draft_gain
    )
    ngrams = frozenset({CandidateSource.NGRAM})
    policies = [Policy(drafters, 8, 0.0, forced=True) for drafters in (LOCAL, ngrams)] + [Policy(frozenset(), 8, 0.0)]
    entries = [Client(loop, [3, 4], policy=policy).running for policy in policies]
    assert list(speculation.shared_out(entries, 0.2, 3.0).values()) == [3.1, 0.1, 0.0]
    assert list(speculation.shared_out(entries[1:], 0.2, 3.0).values()) == [3.2, 0.0]
    assert list(speculation.shared_out(entries[2:], 0.2, 3.0).values()) == [0.0]
