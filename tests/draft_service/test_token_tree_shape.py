"""The shape of a draft's token tree: depth from the last committed token, fixed widths, scores."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from draft_service.__main__ import default_policy
from draft_service.draft_loop import DraftLoop
from draft_service.language_model import LanguageModelDrafter
from draft_service.request import ExpansionPolicy
from draft_service.servicer import DraftLimits, DraftServicer
from specdec.decoding.calibration import Calibration
from specdec.decoding.speculation import Scorer
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import draft_pb2, model_pb2
from tests.draft_service.fakes import VOCABULARY, Engine
from tests.draft_service.test_session import Draft, Undecided


def grown(draft: Draft, best: float = 5.0) -> Draft:
    """Expand all nodes that are worth it."""
    while draft.wants_step:
        draft.step(best)
    return draft


def depths(draft: Draft) -> Counter[int]:
    """Return the number of live nodes by depth below the root, from 1."""
    root = draft.tree.root.position
    return Counter(node.position - root for node in draft.tree.root.walk())


@given(st.integers(1, 6), st.integers(1, 6))
def test_drafting_goes_on_for_the_commit_that_is_under_way(depth: int, committed: int) -> None:
    """Whatever a step commits of a tree of this depth, a tree of this depth is left."""
    draft = grown(Draft(max_depth=depth, max_branches=1, context=60))
    assert max(depths(draft)) == 2 * depth + 1
    accepted = min(committed, depth + 1)
    draft.commit(3, [7] * accepted)
    assert max(depths(draft)) == 2 * depth + 1 - accepted >= depth
    assert max(depths(grown(draft))) == 2 * depth + 1


@pytest.mark.parametrize("widths", [(1, 1, 1), (3,), (3, 2, 1), (1, 4), (2, 2, 2, 2)])
def test_fixed_widths_are_those_of_the_paper_whatever_is_likely(widths: tuple[int, ...]) -> None:
    """SpecInfer (Miao et al. 2024), section 3: node i of the expansion gets k_i children."""
    draft = grown(Draft(expansion=widths, min_path_probability=0.9, engine=Undecided(), context=60))
    assert depths(draft) == {depth: math.prod(widths[:depth]) for depth in range(1, len(widths) + 1)}
    assert len(draft.sent().tokens) == draft.tree.size  # none is held back
    draft.commit(3, [next(iter(draft.tree.root.children))])
    assert max(depths(grown(draft))) == len(widths)


def test_a_node_keeps_the_width_of_the_depth_at_which_it_was_expanded() -> None:
    draft = grown(Draft(expansion=(3, 2, 1), context=60))
    draft.commit(3, [7])
    assert depths(grown(draft)) == {1: 2, 2: 2, 3: 2}


@pytest.mark.parametrize("scorer", Scorer)
def test_scores_are_the_drafts_own_or_calibrated(scorer: Scorer) -> None:
    calibration = Calibration()
    for _ in range(40):
        calibration.learn(0, None, [math.log(0.9)])
    draft = Draft(scorer=scorer, calibration=calibration)
    before = calibration.shifts(0)[:]
    draft.step()
    best = next(iter(draft.tree.root.children.values()))
    own = Draft()
    own.step()
    uncalibrated = next(iter(own.tree.root.children.values())).logprob
    draft.commit(3, [5])
    if scorer is Scorer.PROBABILITY:
        assert best.logprob == pytest.approx(uncalibrated)
        assert calibration.shifts(0) == before  # it learns nothing from logprobs that it did not correct
    else:
        assert best.logprob < 2 * uncalibrated
        assert calibration.shifts(0) != before


def servicer(limits: DraftLimits | None = None) -> DraftServicer:
    identity = model_pb2.ModelIdentity(vocabulary_size=VOCABULARY, context_tokens=100)
    return DraftServicer(DraftLoop(LanguageModelDrafter(Engine())), identity, limits or DraftLimits())


def opening(policy: draft_pb2.DraftPolicy, **fields: Any) -> draft_pb2.DraftRequest:
    return draft_pb2.DraftRequest(
        open=draft_pb2.DraftOpen(prompt_tokens=[1, 2], max_tokens=10, policy=policy, **fields)
    )


WARM: dict[str, Any] = {
    "rule": model_pb2.ACCEPTANCE_RULE_REJECTION,
    "sampling": model_pb2.Sampling(temperature=1.0),
}


@pytest.mark.parametrize(
    ("policy", "fields", "violation"),
    [
        ({"max_branches": 100_000}, {}, ("policy.max_branches", "is 100000, must be at most 16")),
        ({"max_depth": 129}, {}, ("policy.max_depth", "is 129, must be at most 128")),
        ({"min_path_probability": 1.0}, {}, ("policy.min_path_probability", "is 1, must be in [0, 1)")),
        ({"scorer": 9}, {}, ("policy.scorer", "is 9, must be a value of DraftScorer")),
        ({"expansion": [2, 17]}, {}, ("policy.expansion[1]", "is 17, must be 1 to 16")),
        ({"expansion": [2, 0]}, {}, ("policy.expansion[1]", "is 0, must be 1 to 16")),
        ({"expansion": [16, 16]}, {}, ("policy.expansion", "makes a tree of 272 nodes, must make at most 256")),
        ({"expansion": [1] * 129}, {}, ("policy.expansion", "has 129 widths, must have at most 128")),
        ({"expansion": [1, 17]}, WARM, ("policy.expansion[1]", "is 17, must be 1 to 16")),
    ],
)
def test_a_shape_that_cannot_be_is_refused_by_value_and_limit(
    policy: dict[str, Any], fields: dict[str, Any], violation: tuple[str, str]
) -> None:
    service, asked = servicer(), draft_pb2.DraftPolicy(**policy)
    with pytest.raises(InvalidRequestError) as refused:
        service.parse(opening(asked, **fields), None)
    assert refused.value.violations == [violation]
    session = service.parse(opening(draft_pb2.DraftPolicy(), **fields), None)
    with pytest.raises(ValueError, match=violation[1].split(",")[0].replace("[", r"\[")):
        service.act(session, draft_pb2.DraftRequest(policy=asked), 0.0)


def test_a_pod_decides_what_is_left_open_and_grants_no_more_than_its_limits() -> None:
    defaults = ExpansionPolicy(40, 6, 3, 0.01, Scorer.PROBABILITY, (4, 2))
    service = servicer(DraftLimits(defaults, max_nodes=40, max_depth=8, max_branches=4))
    session = service.parse(opening(draft_pb2.DraftPolicy()), None)
    assert session.policy == defaults
    named = draft_pb2.DraftPolicy(max_nodes=100, max_depth=20, max_branches=9, scorer=model_pb2.DRAFT_SCORER_CALIBRATED)
    session = service.parse(opening(named), None)
    assert (session.policy.expansion, session.policy.scorer) == ((), Scorer.CALIBRATED)
    opened = service.opened(session).opened
    assert (opened.max_nodes, opened.max_depth, opened.max_branches) == (40, 8, 4)  # reported to the client


def test_fixed_widths_are_within_the_limits_of_the_pod() -> None:
    service = servicer(DraftLimits(max_depth=8, max_branches=2))
    asked = draft_pb2.DraftPolicy(expansion=[16, *[1] * 15])
    session = service.parse(opening(asked), None)
    assert session.policy.expansion == (2, *[1] * 7)
    opened = service.opened(session).opened
    assert (opened.max_depth, opened.max_branches) == (8, 2)


@pytest.mark.parametrize(
    ("policy", "branches", "expansion"),
    [({}, 1, ()), ({"max_branches": 9}, 9, ()), ({"expansion": [3, 1]}, 3, (3, 1))],
)
def test_where_candidates_are_drawn_they_are_a_chain_unless_siblings_are_asked_for(
    policy: dict[str, Any], branches: int, expansion: tuple[int, ...]
) -> None:
    service = servicer()
    session = service.parse(opening(draft_pb2.DraftPolicy(**policy), **WARM), None)
    assert service.opened(session).opened.max_branches == branches
    assert session.policy.expansion == expansion
    service.act(session, draft_pb2.DraftRequest(policy=draft_pb2.DraftPolicy(**policy)), 0.0)
    assert service.opened(session).opened.max_branches == branches
    assert session.policy.expansion == expansion


USUAL: dict[str, Any] = {
    "max_nodes": 256,
    "depth": ("--depth", 64, "--max-depth", 128),
    "branches": ("--branches", 5, "--max-branches", 16),
    "min_path_probability": 0.002,
    "scorer": Scorer.CALIBRATED,
    "expansion": "",
}


def test_the_options_of_a_draft_make_its_defaults() -> None:
    assert default_policy(**USUAL) == ExpansionPolicy()
    assert default_policy(**USUAL | {"expansion": "4, 2,1"}).expansion == (4, 2, 1)


@pytest.mark.parametrize(
    ("wrong", "option", "problem"),
    [
        ({"depth": ("--depth", 64, "--max-depth", 8)}, "--depth", "is 64, must be at most 8 (--max-depth)"),
        (
            {"branches": ("--branches", 5, "--max-branches", 2)},
            "--branches",
            "is 5, must be at most 2 (--max-branches)",
        ),
        ({"expansion": "4,x"}, "--expansion", "has 'x', must be comma-separated numbers of children"),
        ({"expansion": "4,17"}, "--expansion", "is 4,17: at depth 2 it is 17, must be 1 to 16"),
        ({"expansion": "16,16"}, "--expansion", "is 16,16: makes a tree of 272 nodes, must make at most 256"),
    ],
)
def test_a_wrong_option_stops_the_start_by_its_name(wrong: dict[str, Any], option: str, problem: str) -> None:
    with pytest.raises(typer.BadParameter) as refused:
        default_policy(**USUAL | wrong)
    assert (refused.value.param_hint, refused.value.message) == (option, problem)
