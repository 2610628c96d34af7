"""What a draft receives with each commit, and when it pauses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from orchestrator.generation.draft_control import PAUSED_COMMIT_TOKENS, DraftControl
from orchestrator.generation.speculation_policy import (
    BREAK_EVEN_SHARE,
    FIRST_MIN_PROBABILITY,
    SpeculationState,
    first_min_probability,
)
from specdec.decoding.sampling import Rule
from specdec.v2 import draft_pb2, model_pb2, verifier_pb2
from tests.orchestrator.samples import sample


class Text:
    """Commits of one token each."""

    def __init__(self) -> None:
        self.base = 10

    def commit(self, break_even: float, **fields: Any) -> verifier_pb2.Commit:
        self.base += 1
        committed = model_pb2.Committed(base=self.base - 1, tokens=[self.base])
        return verifier_pb2.Commit(
            committed=committed, drafting_wanted=break_even < 1, min_candidate_probability=break_even, steps=1, **fields
        )


def kinds(messages: list[draft_pb2.DraftRequest]) -> list[str | None]:
    return [message.WhichOneof("message") for message in messages]


def test_a_draft_expands_what_may_be_worth_its_row_a_step_later() -> None:
    draft_control, text = DraftControl(draft_pb2.DraftPolicy(), needed=False), Text()
    policy, committed = draft_control.messages(text.commit(0.5, step_us=1000))
    assert abs(policy.policy.min_path_probability - BREAK_EVEN_SHARE * 0.5) < 1e-6
    assert (committed.committed.base, list(committed.committed.tokens)) == (10, [11])
    assert kinds(list(draft_control.messages(text.commit(0.52, step_us=1000)))) == ["committed"]  # hardly changed


def test_before_the_first_commit_it_expands_only_what_is_probable() -> None:
    assert {first_min_probability(break_even) for break_even in (0.0, 0.5, 1.0)} == {FIRST_MIN_PROBABILITY}


def test_it_pauses_while_nothing_pays_and_hears_of_many_tokens_together() -> None:
    draft_control, text = DraftControl(draft_pb2.DraftPolicy(), needed=False), Text()
    assert not draft_control.paused
    assert kinds(list(draft_control.messages(text.commit(1.0)))) == ["policy"]
    assert draft_control.paused
    told = [message for _ in range(PAUSED_COMMIT_TOKENS - 1) for message in draft_control.messages(text.commit(1.0))]
    assert kinds(told) == ["committed"]
    assert (told[0].committed.base, len(told[0].committed.tokens)) == (10, PAUSED_COMMIT_TOKENS)
    assert kinds(list(draft_control.messages(text.commit(0.3)))) == ["policy", "committed"]
    assert not draft_control.paused


def test_what_a_pause_has_held_back_is_sent_once() -> None:
    draft_control, text = DraftControl(draft_pb2.DraftPolicy(paused=True), needed=False), Text()
    assert [*draft_control.messages(text.commit(1.0)), *draft_control.messages(text.commit(1.0))] == []
    (message,) = draft_control.held_back()
    assert (message.committed.base, list(message.committed.tokens)) == (10, [11, 12])
    assert list(draft_control.held_back()) == []


def test_what_the_target_found_likely_is_for_a_draft_that_learns() -> None:
    """It comes with the tokens of its commit, even after a pause."""
    for learns in (True, False):
        draft_control, text = DraftControl(draft_pb2.DraftPolicy(paused=True), needed=False), Text()
        told: list[draft_pb2.DraftRequest] = []
        for _ in range(PAUSED_COMMIT_TOKENS):
            commit = text.commit(1.0)
            commit.committed.overruled.add(position=commit.committed.base, tokens=[1], logprobs=b"\0\0")
            told += draft_control.messages(commit, learns=learns)
        (message,) = told
        positions = [place.position for place in message.committed.overruled]
        assert positions == list(range(10, 10 + PAUSED_COMMIT_TOKENS)) * learns


def test_one_that_is_paused_to_begin_with_is_woken() -> None:
    draft_control, text = DraftControl(draft_pb2.DraftPolicy(paused=True), needed=False), Text()
    assert draft_control.paused
    assert kinds(list(draft_control.messages(text.commit(1.0)))) == []
    assert kinds(list(draft_control.messages(text.commit(0.9)))) == ["policy", "committed"]
    assert not draft_control.paused


def test_one_that_is_needed_never_pauses() -> None:
    draft_control, text = DraftControl(draft_pb2.DraftPolicy(), needed=True), Text()
    assert kinds(list(draft_control.messages(text.commit(1.0)))) == ["committed"]
    assert not draft_control.paused


def test_many_sessions_send_fewer_messages_each() -> None:
    alone, crowded = (
        next(
            DraftControl(draft_pb2.DraftPolicy(), needed=False).messages(
                Text().commit(0.5, step_us=40_000, drafted_sessions=n)
            )
        )
        for n in (1, 100)
    )
    assert alone.policy.extend_interval_us == 10_000
    assert crowded.policy.extend_interval_us == 40_000  # one message per step


def test_a_draft_is_told_the_round_trip_when_it_changes() -> None:
    draft_control, text = DraftControl(draft_pb2.DraftPolicy(), needed=False), Text()

    def told(round_trip_us: int) -> list[str | None]:
        return kinds(list(draft_control.messages(text.commit(0.5, step_us=40_000, round_trip_us=round_trip_us))))

    assert told(0) == ["policy", "committed"]
    assert told(1000) == ["committed"]  # small compared with 40,000
    assert told(9000) == ["policy", "committed"]
    assert told(9500) == ["committed"]
    policy, _ = draft_control.messages(text.commit(0.5, step_us=40_000, round_trip_us=20_000))
    assert policy.policy.round_trip_us == 20_000


def test_another_verifier_is_told_all_candidates_anew() -> None:
    draft_control = DraftControl(draft_pb2.DraftPolicy(max_nodes=64), needed=False)
    assert kinds(list(draft_control.another_verifier(SpeculationState(True, 64)))) == ["resend"]
    policy, resend = draft_control.another_verifier(SpeculationState(True, 32))
    assert policy.policy.max_nodes == 32
    assert resend.WhichOneof("message") == "resend"


def test_a_draft_sends_whole_rows_to_a_verifier_that_takes_no_others() -> None:
    """A text moves from a verifier of this version to one of the previous version, and back."""
    state = SpeculationState(True, 64, partial_distributions=True)
    draft_control = DraftControl(state.draft_policy(sample(rule=Rule.CONTRASTIVE)), needed=True)
    assert kinds(list(draft_control.another_verifier(state))) == ["resend"]
    for partial in (False, True):
        policy, resend = draft_control.another_verifier(replace(state, partial_distributions=partial))
        assert policy.policy.partial_distributions is partial
        assert resend.WhichOneof("message") == "resend"


def test_partial_distributions_are_for_texts_that_need_a_draft() -> None:
    state = SpeculationState(True, 64, partial_distributions=True)
    assert state.draft_policy(sample(rule=Rule.CONTRASTIVE)).partial_distributions
    assert not state.draft_policy(sample(rule=Rule.COUPLED)).partial_distributions
