"""A verifier's default speculation applies to requests that leave speculation open, and to no others."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.speculation import (
    ALL_DRAFTERS,
    NO_DRAFTERS,
    OWN_DRAFTERS,
    RECENT_DRAFTERS,
    CandidateSource,
    SpeculationOptions,
)
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import model_pb2, verifier_pb2
from tests.verifier_service.fakes import VOCABULARY, TextEngine, step_loop
from verifier_service.__main__ import default_speculation
from verifier_service.backend.request import Policy
from verifier_service.backend.result import Without
from verifier_service.servicer import VerifierLimits, VerifierServicer

LOOKAHEAD = frozenset({CandidateSource.LOOKAHEAD})
OPEN: dict[str, Any] = {"drafters": sorted(ALL_DRAFTERS), "unspecified": True}
WARM: dict[str, Any] = {"sampling": {"temperature": 1.0}, "rule": model_pb2.ACCEPTANCE_RULE_REJECTION}


def policy_of(default: SpeculationOptions, policy: dict[str, Any], most_rows: int = 128, **fields: Any) -> Policy:
    identity = model_pb2.ModelIdentity(vocabulary_size=VOCABULARY, context_tokens=256)
    limits = VerifierLimits(speculation=default, max_window_rows=most_rows)
    service = VerifierServicer(step_loop(TextEngine(8)), identity, limits)
    fields |= {"prompt_tokens": [2, 3], "max_tokens": 10, "policy": policy}
    message = verifier_pb2.VerifyOpen(**fields)
    policy_found = service.parse(verifier_pb2.VerifyRequest(open=message), None).policy
    assert isinstance(policy_found, Policy)
    return policy_found


def default(
    name: Any, lookahead: tuple[int, int, int] | None = None, jacobi: int | None = None, model: str | None = None
) -> SpeculationOptions:
    return default_speculation(name, lookahead, jacobi, 128, model)


@pytest.mark.parametrize(
    ("options", "drafters", "lookahead"),
    [
        (default("auto"), ALL_DRAFTERS, None),
        (default("off"), NO_DRAFTERS, None),
        (default("local"), OWN_DRAFTERS, None),
        (default("ngram"), {CandidateSource.NGRAM}, None),
        (default("lookahead"), LOOKAHEAD, None),
        (default("lookahead", (5, 3, 5)), LOOKAHEAD, (5, 3, 5)),
        (default("lookahead", (5, 3, 5), model="--heads"), LOOKAHEAD, (5, 3, 5)),
        (default("auto", None, 8), ALL_DRAFTERS, (8, 2, 1)),
        (default("jacobi"), LOOKAHEAD, None),
    ],
)
def test_it_decides_where_the_request_names_nothing(
    options: SpeculationOptions, drafters: frozenset[CandidateSource], lookahead: tuple[int, int, int] | None
) -> None:
    found = policy_of(options, OPEN)
    assert (found.drafters, found.lookahead) == (drafters, lookahead)
    assert found.jacobi is options.jacobi
    named = policy_of(options, {"drafters": [CandidateSource.NGRAM]})
    assert (named.drafters, named.lookahead, named.jacobi) == (frozenset({CandidateSource.NGRAM}), None, False)


def test_it_adds_recent_drafters_which_orchestrators_do_not_name() -> None:
    drafters = sorted(ALL_DRAFTERS - RECENT_DRAFTERS)
    assert policy_of(default("auto"), {"drafters": drafters, "unspecified": True}).drafters == ALL_DRAFTERS
    assert policy_of(default("auto"), {"drafters": drafters}).drafters == set(drafters)
    assert policy_of(default("auto"), {"unspecified": True}).drafters == NO_DRAFTERS


def test_it_adds_no_drafter_that_is_not_there() -> None:
    own = {"drafters": sorted(OWN_DRAFTERS), "unspecified": True}
    assert policy_of(default("always"), own).drafters == NO_DRAFTERS
    assert policy_of(default("always"), OPEN).forced


def test_a_default_without_drafters_says_why() -> None:
    own = {"drafters": sorted(OWN_DRAFTERS), "unspecified": True}
    assert policy_of(default("off"), OPEN).why_none is Without.OFF_BY_DEFAULT
    assert policy_of(default("draft"), own).why_none is Without.NO_DRAFT_SERVICE
    assert policy_of(default("jacobi"), OPEN, **WARM).why_none is Without.NO_DRAFTER
    assert policy_of(default("off"), {"drafters": []}).why_none is Without.NO_DRAFTER


def test_contrastive_texts_keep_their_draft() -> None:
    rule = model_pb2.ACCEPTANCE_RULE_CONTRASTIVE
    assert policy_of(default("ngram"), OPEN, rule=rule).drafters == ALL_DRAFTERS


def test_a_window_that_the_rule_excludes_is_left_out() -> None:
    found = policy_of(default("auto", (5, 3, 5)), OPEN, **WARM)
    assert (found.drafters, found.lookahead) == (ALL_DRAFTERS - LOOKAHEAD, None)
    assert policy_of(default("jacobi"), OPEN, **WARM).drafters == NO_DRAFTERS
    assert policy_of(default("lookahead", (5, 3, 5)), OPEN, **WARM).lookahead == (5, 3, 5)


def test_a_pods_limit_on_windows_refuses_by_value_and_limit() -> None:
    asked = {"drafters": [CandidateSource.LOOKAHEAD], "lookahead": {"window": 7, "ngram": 5, "guesses": 7}}
    assert policy_of(SpeculationOptions(), asked, 36).lookahead == Lookahead(7, 5, 7)
    with pytest.raises(InvalidRequestError) as refused:
        policy_of(SpeculationOptions(), asked, 35)
    problem = "is (7, 5, 7), adds 36 tokens to a step, must add at most 35"
    assert refused.value.violations == [("policy.lookahead", problem)]


@pytest.mark.parametrize(
    ("given", "option", "problem"),
    [
        (
            ("auto", (40, 5, 3), None),
            "--lookahead",
            "is 40 5 3: adds 168 tokens to a step, must add at most 128 (--max-window-rows)",
        ),
        (("auto", (1, 5, 3), None), "--lookahead", "is 1 5 3: W is 1, must be at least 2"),
        (("auto", (4, 5, 65), None), "--lookahead", "is 4 5 65: G is 65, must be 1 to 64"),
        (("auto", None, 1), "--jacobi", "is 1, must be at least 2"),
        (
            ("auto", None, 500),
            "--jacobi",
            "is 500, must be at most 129 (--max-window-rows 128)",
        ),
        (("auto", (4, 3, 4), 8), "--jacobi", "cannot be combined with --lookahead"),
        (
            ("ngram", (4, 3, 4), None),
            "--lookahead",
            "is 4 3 4, but --speculation ngram uses no lookahead windows",
        ),
        (("auto", (4, 3, 4), None, "--heads"), "--lookahead", "would replace --heads in every request"),
        (
            ("local", (4, 3, 4), None, "--draft-model"),
            "--lookahead",
            "would replace --draft-model in every request",
        ),
        (("auto", None, 8, "--draft-model"), "--jacobi", "would replace --draft-model in every request"),
        (("jacobi", (4, 3, 4), None), "--lookahead", "is 4 3 4: N is 3, must be 2 with --speculation jacobi"),
    ],
)
def test_a_wrong_default_stops_the_start_by_its_name(given: Any, option: str, problem: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        default(*given)
    assert refused.value.param_hint == option
    assert refused.value.message.startswith(problem)
