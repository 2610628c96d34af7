"""Messages to verifier and draft, derived from a text's speculation state."""

from __future__ import annotations

import pytest

from orchestrator.generation.draft_control import DraftControl
from orchestrator.generation.speculation_policy import FIRST_MIN_PROBABILITY, SpeculationState
from specdec.decoding.sampling import Rule
from specdec.decoding.speculation import (
    ALL_DRAFTERS,
    OWN_DRAFTERS,
    Outlook,
    Scorer,
    SpeculationOptions,
    drafters_of,
)
from specdec.v2 import verifier_pb2
from tests.orchestrator.samples import context, sample

FORCED = SpeculationOptions(forced=True)


def test_what_changes_makes_another_state() -> None:
    begun = SpeculationState(drafted=True)
    opened = begun.after_opened(
        verifier_pb2.VerifyOpened(max_nodes=64, drafting_wanted=True, min_candidate_probability=0.25)
    )
    committed = opened.after_commit(verifier_pb2.Commit(min_candidate_probability=0.5))
    assert begun == SpeculationState(drafted=True)
    assert opened == SpeculationState(True, 64, Outlook(drafting_wanted=True, break_even=0.25))
    assert committed == SpeculationState(True, 64, Outlook(drafting_wanted=False, break_even=0.5))


def test_a_verifier_that_grants_nothing_grants_one() -> None:
    assert SpeculationState(drafted=True).after_opened(verifier_pb2.VerifyOpened()).max_nodes == 1


@pytest.mark.parametrize(
    ("drafted", "wanted", "fields", "worth"),
    [
        (True, False, {}, False),
        (True, True, {}, True),
        (False, False, {}, True),  # without a draft, the verifier cannot judge
        (True, False, {"speculation": FORCED}, True),
        (True, False, {"rule": Rule.CONTRASTIVE}, True),
    ],
)
def test_when_a_draft_is_worth_asking(drafted: bool, wanted: bool, fields: dict[str, object], worth: bool) -> None:
    assert SpeculationState(drafted, outlook=Outlook(wanted)).worth_a_draft(sample(**fields)) is worth


def test_a_verifier_waits_for_a_draft_only_while_there_is_one() -> None:
    for drafted, drafters in ((True, ALL_DRAFTERS), (False, OWN_DRAFTERS)):
        policy = SpeculationState(drafted).verify_policy(context(speculation=SpeculationOptions(max_candidates=9)))
        assert set(drafters_of(policy.drafters)) == drafters
        assert (policy.forced, policy.max_candidates, policy.patience_us) == (False, 9, 50_000)


KNOWN_TO_THE_LAST_VERSION = {1, 2, 3, 4}
"""Drafters of `UNRELEASED` or the last tag (`tests/services/test_last_version.py`), which refuses others. A drafter
added since belongs into `RECENT_DRAFTERS`."""


def test_recent_drafters_are_named_on_request_only() -> None:
    state = SpeculationState(True)
    for unspecified, named in ((False, set(map(int, ALL_DRAFTERS))), (True, KNOWN_TO_THE_LAST_VERSION)):
        asked = SpeculationOptions(unspecified=unspecified)
        assert set(map(int, state.verify_policy(context(speculation=asked)).drafters)) == named


def test_a_draft_opens_with_what_pays_now() -> None:
    state = SpeculationState(True, 64, Outlook(drafting_wanted=False, break_even=0.5))
    policy = state.draft_policy(sample(speculation=SpeculationOptions(max_depth=3, max_branches=2)))
    assert (policy.max_nodes, policy.max_depth, policy.max_branches) == (64, 3, 2)
    assert policy.paused
    assert policy.min_path_probability == pytest.approx(FIRST_MIN_PROBABILITY)


def test_the_token_tree_of_a_request_reaches_verifier_and_draft() -> None:
    asked = SpeculationOptions(
        max_depth=4, max_nodes=30, min_path_probability=0.25, scorer=Scorer.PROBABILITY, expansion=(3, 1)
    )
    state = SpeculationState(True, 64, Outlook(drafting_wanted=True, break_even=0.5))
    policy = state.draft_policy(sample(speculation=asked))
    assert (policy.max_nodes, policy.min_path_probability) == (30, 0.25)
    assert (int(policy.scorer), list(policy.expansion)) == (int(Scorer.PROBABILITY), [3, 1])
    assert state.verify_policy(context(speculation=asked)).max_depth == 4
    control = DraftControl(policy, asked, needed=False)
    (resend,) = control.another_verifier(SpeculationState(True, 200))  # the limit is still 30
    assert resend.WhichOneof("message") == "resend"
    assert next(message.policy.max_nodes for message in control.another_verifier(SpeculationState(True, 20))) == 20


@pytest.mark.parametrize("fields", [{"speculation": FORCED}, {"rule": Rule.CONTRASTIVE}])
def test_a_draft_that_is_forced_opens_with_all_that_it_finds(fields: dict[str, object]) -> None:
    policy = SpeculationState(True).draft_policy(sample(**fields))
    assert not policy.paused
    assert not policy.min_path_probability
