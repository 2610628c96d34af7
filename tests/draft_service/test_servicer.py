"""How the servicer handles the messages of an open session."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest

from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.servicer import MAX_COMMIT_TOKENS, DraftLimits, DraftServicer
from draft_service.session import DrafterSession
from draft_service.traffic import Traffic
from specdec.serving.errors import InvalidRequestError
from specdec.serving.target_logprobs import MAX_TOP
from specdec.v2 import draft_pb2, model_pb2
from tests.draft_service.fakes import VOCABULARY, Engine, session


@pytest.mark.parametrize("granted", [1, 64, 200])
def test_a_session_gets_back_what_another_verifier_grants(granted: int) -> None:
    """The session's memory limits the grant."""
    servicer = DraftServicer(DraftLoop(LanguageModelDrafter(Engine())), model_pb2.ModelIdentity(), DraftLimits())
    draft = session(max_nodes=200)
    for most, becomes in ((granted, granted), (256, 200), (0, 200)):
        request = draft_pb2.DraftRequest(policy=draft_pb2.DraftPolicy(max_nodes=most))
        servicer.act(draft, request, 0.0)
        assert draft.policy.max_nodes == becomes


def parsed(**fields: Any) -> DrafterSession:
    """Return the session for an opening whose target has half of the draft's vocabulary."""
    identity = model_pb2.ModelIdentity(vocabulary_size=VOCABULARY, context_tokens=100)
    servicer = DraftServicer(DraftLoop(LanguageModelDrafter(Engine())), identity, DraftLimits())
    usual: dict[str, Any] = {"prompt_tokens": [1, 2], "max_tokens": 10, "vocabulary_size": VOCABULARY // 2}
    return servicer.parse(draft_pb2.DraftRequest(open=draft_pb2.DraftOpen(**(usual | fields))), None)


UNKNOWN = VOCABULARY // 2
"""A token of the draft that its target lacks."""


@pytest.mark.parametrize(
    ("field", "fields"),
    [
        ("prompt_tokens[1]", {"prompt_tokens": [1, UNKNOWN]}),
        ("generated_tokens[0]", {"generated_tokens": [UNKNOWN]}),
        (f"sampling.logit_bias[{UNKNOWN}]", {"sampling": model_pb2.Sampling(logit_bias={UNKNOWN: 1.0})}),
        ("sampling.banned_tokens", {"sampling": model_pb2.Sampling(banned_tokens=[UNKNOWN])}),
        (
            "sampling.banned_sequences",
            {"sampling": model_pb2.Sampling(banned_sequences=[model_pb2.TokenSequence(tokens=[1, UNKNOWN])])},
        ),
    ],
)
def test_tokens_that_the_target_does_not_know_are_refused(field: str, fields: dict[str, Any]) -> None:
    """Unknown tokens exceed the arrays for the session's penalties and biases."""
    fields["sampling"] = fields.get("sampling") or model_pb2.Sampling(repetition_penalty=1.5)
    with pytest.raises(InvalidRequestError) as refused:
        parsed(**fields)
    ((found, problem),) = refused.value.violations
    assert found == field
    assert problem.endswith(f"a token id below {UNKNOWN}")


def test_a_target_that_knows_more_is_served() -> None:
    assert parsed(vocabulary_size=2 * VOCABULARY, prompt_tokens=[UNKNOWN]).vocabulary == VOCABULARY
    assert parsed(vocabulary_size=0, prompt_tokens=[UNKNOWN]).vocabulary == VOCABULARY


def test_what_a_request_says_of_tokens_beyond_the_draft_is_dropped_there() -> None:
    """The target may choose them; the draft proposes only its own tokens."""
    beyond = VOCABULARY + 3
    sampling = model_pb2.Sampling(
        logit_bias={beyond: 5.0, 7: 1.0}, banned_tokens=[*range(VOCABULARY, 2 * VOCABULARY), 9]
    )
    draft = parsed(vocabulary_size=2 * VOCABULARY, sampling=sampling, end_tokens=[beyond, 4])
    kept = draft.request.sampler.sampling
    assert kept.logit_bias == {7: 1.0}
    assert (kept.banned_tokens, draft.request.end_tokens) == (frozenset({9}), frozenset({4}))


@pytest.mark.parametrize(
    ("sampling", "problem"),
    [
        (model_pb2.Sampling(logit_bias={2 * VOCABULARY: 1.0}), f"keyed by a token id below {2 * VOCABULARY}"),
        (model_pb2.Sampling(logit_bias={VOCABULARY: 101.0}), "must be in [-100, 100]"),
        (model_pb2.Sampling(banned_tokens=range(VOCABULARY)), f"leaves none of the {VOCABULARY} tokens to choose"),
    ],
)
def test_what_is_wrong_for_the_target_or_leaves_the_draft_nothing_is_refused(
    sampling: model_pb2.Sampling, problem: str
) -> None:
    with pytest.raises(InvalidRequestError, match=re.escape(problem)):
        parsed(vocabulary_size=2 * VOCABULARY, sampling=sampling)


def test_a_text_with_a_token_beyond_the_draft_is_that_texts_fact() -> None:
    """The orchestrator avoids this draft for this text; a ProtocolError would count against the pod."""
    draft = parsed(vocabulary_size=2 * VOCABULARY)
    with pytest.raises(InvalidRequestError, match=f"committed.tokens: has token {VOCABULARY}, the draft's vocabulary"):
        draft.commit(2, [VOCABULARY])


@pytest.mark.parametrize("probability", [1.0, 1.5, -0.1, math.nan])
def test_a_probability_that_no_node_has_is_refused(probability: float) -> None:
    """1 once meant a paused draft; now `paused` does."""
    policy = draft_pb2.DraftPolicy(min_path_probability=probability)
    with pytest.raises(InvalidRequestError) as refused:
        parsed(policy=policy)
    ((field, problem),) = refused.value.violations
    assert (field, problem.partition(", ")[2]) == ("policy.min_path_probability", "must be in [0, 1)")
    servicer = DraftServicer(DraftLoop(LanguageModelDrafter(Engine())), model_pb2.ModelIdentity(), DraftLimits())
    with pytest.raises(ValueError, match=r"policy\.min_path_probability is .*, must be in \[0, 1\)"):
        servicer.act(session(), draft_pb2.DraftRequest(policy=policy), 0.0)


def test_a_paused_draft_is_one_by_a_field_of_its_own() -> None:
    assert parsed(policy=draft_pb2.DraftPolicy(paused=True, min_path_probability=0.5)).policy.paused
    assert not parsed(policy=draft_pb2.DraftPolicy(min_path_probability=0.999)).policy.paused


PLACE = {"tokens": [7, 3], "logprobs": np.array([-0.5, -1.5], "<f2").tobytes()}


def told(learn: bool, places: list[dict[str, Any]], traffic: Traffic | None) -> DrafterSession:
    """Return a session that gets a commit of two tokens, with the target's log-probabilities at these places."""
    identity = model_pb2.ModelIdentity(vocabulary_size=VOCABULARY, context_tokens=100)
    servicer = DraftServicer(DraftLoop(LanguageModelDrafter(Engine()), traffic), identity, DraftLimits())
    opening = draft_pb2.DraftOpen(prompt_tokens=[1, 2], max_tokens=10, vocabulary_size=VOCABULARY * 2, learn=learn)
    opened = servicer.parse(draft_pb2.DraftRequest(open=opening), None)
    keeps = learn and traffic is not None
    asked = MAX_TOP if keeps and traffic is not None and traffic.most_places else 0
    handshake = servicer.opened(opened).opened
    assert (handshake.keeps_text, handshake.overruled_logprobs) == (keeps, asked)
    committed = model_pb2.Committed(base=2, tokens=[7, 8])
    committed.overruled.extend([model_pb2.TargetLogprobs(**place) for place in places])
    servicer.act(opened, draft_pb2.DraftRequest(committed=committed), 0.0)
    assert opened.tree.committed == [1, 2, 7, 8]
    return opened


def test_log_probabilities_of_the_target_are_taken_from_texts_that_are_kept() -> None:
    places = [{"position": 2, **PLACE}, {"position": 3, **PLACE, "tokens": [VOCABULARY + 1, 3]}]
    keeping, frugal = Traffic(100, most_bytes=10_000), Traffic(100)
    assert [place.position for place in told(True, places, keeping).places] == [2, 3]
    for learn, traffic in ((False, keeping), (True, frugal), (True, None), (False, None)):
        assert told(learn, places, traffic).places == []


@pytest.mark.parametrize(
    "place", [{"position": 1}, {"position": 4}, {"tokens": [VOCABULARY * 2, 3]}, {"logprobs": b""}]
)
def test_log_probabilities_that_are_not_sound_are_refused(place: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="overruled: "):
        told(True, [{"position": 2, **PLACE, **place}], Traffic(100, most_bytes=10_000))


@pytest.mark.parametrize(
    ("tokens", "problem"),
    [(5, "a commit ends at token 7, the text has at most 6"), (MAX_COMMIT_TOKENS + 1, "must have at most 4096")],
)
def test_no_commit_is_longer_than_its_text(tokens: int, problem: str) -> None:
    servicer = DraftServicer(DraftLoop(LanguageModelDrafter(Engine())), model_pb2.ModelIdentity(), DraftLimits())
    text = parsed(max_tokens=4)
    message = draft_pb2.DraftRequest(committed=model_pb2.Committed(base=2, tokens=[7] * tokens))
    with pytest.raises(ValueError, match=problem):
        servicer.act(text, message, 0.0)
