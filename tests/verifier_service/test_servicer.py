"""What the servicer makes of the messages of a session."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.decoding.speculation import NO_DRAFTERS, Drafter
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import model_pb2, verifier_pb2
from tests.verifier_service.fakes import VOCABULARY, TextEngine, step_loop
from verifier_service.servicer import MOST_LOGPROBS, Limits, VerifierServicer
from verifier_service.sessions.session import Session


def servicer() -> VerifierServicer:
    identity = model_pb2.ModelIdentity(vocabulary_size=VOCABULARY, context_tokens=256)
    return VerifierServicer(step_loop(TextEngine(8)), identity, Limits())


def parsed(**fields: Any) -> Session:
    usual: dict[str, Any] = {"prompt_tokens": [2, 3], "max_tokens": 10}
    session = servicer().parse(verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(**(usual | fields))))
    assert isinstance(session, Session)
    return session


def violation(**fields: Any) -> tuple[str, str]:
    with pytest.raises(InvalidRequestError) as refused:
        parsed(**fields)
    (found,) = refused.value.violations
    return found


@pytest.mark.parametrize("wanted", [None, 0, 1, MOST_LOGPROBS])
def test_log_probabilities_are_asked_for_by_their_number(wanted: int | None) -> None:
    fields = {} if wanted is None else {"top_logprobs": wanted}
    assert parsed(**fields).request.top_logprobs == wanted


def test_one_more_than_there_may_be_is_refused() -> None:
    """Which once was the most there may be: k + 1 stood for k."""
    assert violation(top_logprobs=MOST_LOGPROBS + 1) == ("top_logprobs", "is 21, must be at most 20")


@pytest.mark.parametrize(
    ("drafters", "problem"), [([0], "has 0, must have values of Drafter"), ([9], "has 9, must have values of Drafter"),
    ([1, 1], "names a drafter twice"), ([1] * 9, "has 9 entries, must have at most 4")],
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
    assert violation(policy=policy) == ("policy.lookahead", "is set, needs the drafter LOOKAHEAD")
    policy.drafters.append(model_pb2.DRAFTER_LOOKAHEAD)
    assert parsed(policy=policy).policy.lookahead == (5, 3, 3)


def test_a_session_has_the_drafters_that_are_named() -> None:
    assert parsed().policy.drafters == NO_DRAFTERS
    named = verifier_pb2.VerifyPolicy(drafters=[model_pb2.DRAFTER_REMOTE, model_pb2.DRAFTER_NGRAM])
    policy = parsed(policy=named).policy
    assert policy.drafters == {Drafter.REMOTE, Drafter.NGRAM}
    assert policy.remote
    assert policy.own
    assert policy.ngram
    assert not policy.windows
    assert not policy.local_model
