"""How the servicer handles the messages of a session."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from specdec.decoding.speculation import NO_DRAFTERS, CandidateSource
from specdec.serving.errors import InvalidRequestError, OverloadedError, TenantLimitError, TooLateError
from specdec.serving.validation import MAX_LOGPROBS
from specdec.v2 import model_pb2, verifier_pb2
from tests.serving.test_sessions import Context
from tests.stack import until
from tests.verifier_service.fakes import VOCABULARY, TextEngine, step_loop
from verifier_service.servicer import VerifierLimits, VerifierServicer
from verifier_service.sessions.session import VerifierSession


class ParsingInThreads(VerifierServicer):
    """Parses every `open` in a thread, like a long one."""

    def takes_long(self, request: verifier_pb2.VerifyRequest) -> bool:
        return True


def servicer(kind: type[VerifierServicer] = VerifierServicer) -> VerifierServicer:
    """Return a servicer of a loop whose thread is not started."""
    identity = model_pb2.ModelIdentity(vocabulary_size=VOCABULARY, context_tokens=256)
    return kind(step_loop(TextEngine(8)), identity, VerifierLimits())


def parsed(**fields: Any) -> VerifierSession:
    usual: dict[str, Any] = {"prompt_tokens": [2, 3], "max_tokens": 10}
    session = servicer().parse(verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(**(usual | fields))), None)
    assert isinstance(session, VerifierSession)
    return session


def violation(**fields: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as refused:
        parsed(**fields)
    (found,) = refused.value.violations
    return found


@pytest.mark.parametrize("wanted", [None, 0, 1, MAX_LOGPROBS])
def test_log_probabilities_are_asked_for_by_their_number(wanted: int | None) -> None:
    fields = {} if wanted is None else {"top_logprobs": wanted}
    assert parsed(**fields).request.top_logprobs == wanted


def test_one_more_than_there_may_be_is_refused() -> None:
    """Guards against an off-by-one error: k + 1 was once accepted at a limit of k."""
    assert violation(top_logprobs=MAX_LOGPROBS + 1) == ("top_logprobs", "is 21, must be at most 20")
    assert violation(prompt_logprobs=MAX_LOGPROBS + 1) == ("prompt_logprobs", "is 21, must be at most 20")
    assert violation(scored_tokens=99) == ("scored_tokens", "is 99, must be at most the 2 prompt_tokens")


@pytest.mark.parametrize("wanted", [None, 0, MAX_LOGPROBS])
def test_log_probabilities_of_a_prompt_are_told_to_be_known(wanted: int | None) -> None:
    asked = {} if wanted is None else {"prompt_logprobs": wanted, "scored_tokens": 2}
    session = parsed(prompt_tokens=[2, 3, 4], **asked)
    assert session.scores_prompt == servicer().opened(session).opened.scores_prompt == (wanted is not None)
    assert session.scored == (1 if wanted is None else 2)


def sequences(*tokens: Sequence[int]) -> model_pb2.Sampling:
    return model_pb2.Sampling(banned_sequences=[model_pb2.TokenSequence(tokens=each) for each in tokens])


def test_banned_sequences_are_told_to_be_known() -> None:
    for sampling, known in ((sequences(), False), (sequences([2, 3], [2, 3], [4, 5, 6]), True)):
        session = parsed(sampling=sampling)
        assert servicer().opened(session).opened.bans_sequences == known
    assert session.request.sampler.sampling.banned_sequences == {(2, 3), (4, 5, 6)}


def test_typical_p_is_told_to_be_known() -> None:
    for typical_p in (0.0, 0.5, 1.0):
        session = parsed(sampling=model_pb2.Sampling(typical_p=typical_p))
        assert servicer().opened(session).opened.applies_typical_p == (typical_p == 0.5)


def test_a_cache_salt_is_told_to_be_known() -> None:
    for salt, scope in (("", b"t"), ("s" * 256, b"t\xff" + b"s" * 256)):
        session = parsed(tenant="t", cache_salt=salt)
        assert session.request.cache_scope == scope
        assert servicer().opened(session).opened.salts_cache == bool(salt)
    assert violation(cache_salt="s" * 257) == ("cache_salt", "has 257 characters, must have at most 256")


@pytest.mark.parametrize(
    ("sampling", "field", "problem"),
    [
        (sequences([2, 3], [4]), "[1]", "has 1 tokens, must have 2 to 64"),
        (sequences([2] * 65), "[0]", "has 65 tokens, must have 2 to 64"),
        (sequences(*[[2, 3]] * 769), "", "has 769 sequences, must have at most 768"),
        (sequences([2, VOCABULARY]), "", f"is {VOCABULARY}, must be a token id below {VOCABULARY}"),
        (
            sequences(*([2, token] for token in range(VOCABULARY))),
            "",
            "together with banned_tokens, may ban all 12 tokens where a banned sequence would end",
        ),
    ],
)
def test_banned_sequences_that_cannot_be_are_refused(sampling: model_pb2.Sampling, field: str, problem: str) -> None:
    assert violation(sampling=sampling) == (f"sampling.banned_sequences{field}", problem)


@pytest.mark.parametrize(
    ("drafters", "problem"), [([0], "has 0, must have values of Drafter"), ([9], "has 9, must have values of Drafter"),
    ([1, 0], "has 0, must have values of Drafter"), ([1, 1], "has a drafter twice"),
    ([1] * 33, "has 33 entries, must have at most 32")],
)  # fmt: skip
def test_drafters_that_cannot_be_are_refused(drafters: list[Any], problem: str) -> None:
    policy = verifier_pb2.VerifyPolicy(drafters=drafters)
    assert violation(policy=policy) == ("policy.drafters", problem)
    service, session = servicer(), parsed()
    with pytest.raises(ValueError, match=problem):
        service.act(session, verifier_pb2.VerifyRequest(policy=policy), 0.0)


def test_a_window_without_its_drafter_is_refused() -> None:
    window = model_pb2.Lookahead(window=5, ngram=3, guesses=3)
    policy = verifier_pb2.VerifyPolicy(drafters=[model_pb2.DRAFTER_NGRAM], lookahead=window)
    assert violation(policy=policy) == ("policy.lookahead", "is set, which requires the drafter LOOKAHEAD")
    policy.drafters.append(model_pb2.DRAFTER_LOOKAHEAD)
    assert parsed(policy=policy).policy.lookahead == (5, 3, 3)


@pytest.mark.parametrize(("field", "most"), [("max_candidates", 128), ("max_depth", 128), ("overruled_logprobs", 64)])
def test_more_than_any_pod_grants_is_refused(field: str, most: int) -> None:
    parsed(policy=verifier_pb2.VerifyPolicy(**{field: most}))  # type: ignore[arg-type]
    policy = verifier_pb2.VerifyPolicy(**{field: most + 1})  # type: ignore[arg-type]
    assert violation(policy=policy) == (f"policy.{field}", f"is {most + 1}, must be at most {most}")


def test_a_session_has_the_drafters_that_are_named() -> None:
    assert parsed().policy.drafters == NO_DRAFTERS
    named = verifier_pb2.VerifyPolicy(drafters=[model_pb2.DRAFTER_REMOTE, model_pb2.DRAFTER_NGRAM])
    policy = parsed(policy=named).policy
    assert policy.drafters == {CandidateSource.REMOTE, CandidateSource.NGRAM}
    assert policy.remote
    assert policy.own
    assert policy.ngram
    assert not policy.windows


def test_drafters_of_a_newer_version_are_ignored_beside_others() -> None:
    """As in a rolling upgrade: `local` names all drafters inside the verifier."""
    newer: list[Any] = [model_pb2.DRAFTER_NGRAM, max(CandidateSource) + 1]
    assert parsed(policy=verifier_pb2.VerifyPolicy(drafters=newer)).policy.drafters == {CandidateSource.NGRAM}


def test_a_tenants_weight_and_its_order_of_requests() -> None:
    request = parsed(tenant="acme", tenant_weight=2.5, priority=-3).request
    assert (request.tenant, request.weight, request.priority) == ("acme", 2.5, -3)
    assert (parsed().request.weight, parsed().request.priority) == (1.0, 0)
    assert (parsed(tenant_weight=0.01).request.weight, parsed(tenant_weight=100).request.weight) == (0.01, 100.0)


@pytest.mark.parametrize(("weight", "told"), [(0.001, "0.001"), (101, "101"), (-1, "-1"), (float("nan"), "nan")])
def test_a_weight_that_cannot_be_is_refused(weight: float, told: str) -> None:
    assert violation(tenant_weight=weight) == ("tenant_weight", f"is {told}, must be from 0.01 to 100")


def test_a_tenant_leaves_places_in_the_waiting_room_to_others() -> None:
    """Alone, a tenant takes at most 114 of 128 places; others still get some, and together never more than 128."""
    service = servicer()
    load = service._backend.stats

    def admitted(tenant: str) -> bool:
        request = verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(prompt_tokens=[2], tenant=tenant))
        try:
            service.admit(request, None)
        except OverloadedError:
            return False
        load.new_of[tenant] += 1
        load.waiting += 1
        return True

    counts = {tenant: sum(admitted(tenant) for _ in range(200)) for tenant in ("flood", "other", "third")}
    assert counts == {"flood": 114, "other": 13, "third": 1}
    load.waiting -= 1
    load.new_of["third"] -= 1
    with pytest.raises(TenantLimitError, match="'flood': 114 of its sessions are waiting") as refused:
        service.admit(verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(prompt_tokens=[2], tenant="flood")), None)
    assert refused.value.retry_after > 0
    again = verifier_pb2.VerifyOpen(prompt_tokens=[2], tenant="flood", attempt=2)
    service.admit(verifier_pb2.VerifyRequest(open=again), None)  # resumptions are admitted


@pytest.mark.parametrize("long", [False, True], ids=["parsed at once", "parsed in threads"])
async def test_sessions_on_their_way_to_the_loop_take_places(long: bool) -> None:
    """The loop takes no sessions during a step, but this gives a flood no extra places."""
    service = servicer(ParsingInThreads if long else VerifierServicer)
    service._backend.stats.waiting = 1  # so the next session waits too
    service._backend.stats.new_of["other"] = 1
    opening = verifier_pb2.VerifyOpen(prompt_tokens=[2], max_tokens=10, tenant="flood")

    async def requests() -> AsyncIterator[verifier_pb2.VerifyRequest]:
        yield verifier_pb2.VerifyRequest(open=opening)
        await asyncio.Event().wait()

    context: Any = Context()
    calls = [asyncio.create_task(service.run(requests(), context)) for _ in range(200)]
    try:
        await until(lambda: service.capacity().sessions + sum(call.done() for call in calls) == 200)
        refused = [call.exception() for call in calls if call.done()]
        assert {type(error) for error in refused} == {TenantLimitError}
        assert len(calls) - len(refused) == 113
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def test_preempted_texts_take_no_place_in_the_waiting_room() -> None:
    """Another tenant is not refused because of a flood's preempted texts."""
    service = servicer()
    load = service._backend.stats
    load.waiting, load.new_of["flood"], load.running, load.lifetime = 114 + 200, 114, 1, 0.01
    request = verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(prompt_tokens=[2], tenant="other"))
    service.admit(request, None)
    assert service.capacity().room == 128 - 114
    assert service.capacity().wait_us == pytest.approx(10_000 * 315, abs=1)  # a new session queues behind all of them
    load.new_of["flood"] = 128
    with pytest.raises(OverloadedError, match="128 sessions are waiting for memory, the limit is 128"):
        service.admit(request, None)


def test_a_text_that_cannot_be_finished_in_time_is_refused_at_once() -> None:
    """Only once text durations are known, and not while the pod is idle."""
    service, now = servicer(), time.monotonic()
    load = service._backend.stats
    long = verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(prompt_tokens=[2], max_tokens=1000))
    service.admit(long, now + 0.001)
    load.interval, load.usual_tokens, load.lifetime = 0.1, 400.0, 40.0
    service.admit(long, now + 0.001)
    load.running, load.idle = 4, False
    with pytest.raises(TooLateError, match=r"would take about 50\.0 s, but its deadline leaves \d+\.\d s") as refused:
        service.admit(long, now + 30)
    assert refused.value.retry_after > 0
    service.admit(long, now + 60)
    service.admit(long, None)
    long.open.max_tokens = 200
    service.admit(long, now + 30)
    load.waiting = 3
    with pytest.raises(TooLateError, match=r"would take about 65\.0 s"):  # four of 40 s end in 40 s, then this one runs
        service.admit(long, now + 60)
    load.waiting, load.usual_tokens = 0, 1000.0
    long.open.max_tokens, long.open.generated_tokens[:] = 1000, [3] * 990  # resumed: 10 tokens are missing
    service.admit(long, now + 10)
    long.open.attempt = 2
    service.admit(long, now + 1)  # resumptions are admitted
