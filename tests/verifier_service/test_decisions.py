"""Every step that chooses a token reports what decided on its candidates."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from specdec.decoding.speculation import NO_DRAFTERS, OWN_DRAFTERS, CandidateSource
from specdec.serving.timeline import Timeline
from specdec.v2 import model_pb2, verifier_pb2
from tests.verifier_service.fakes import DEAR, FREE, Client, Decided, TextEngine, run, step_loop
from tests.verifier_service.step_loop.helpers import NO_BAD, REMOTE
from verifier_service.backend.request import Policy
from verifier_service.backend.result import CommitDetails, Decision, Mode, VerifyResult, Without
from verifier_service.costs.token_budget import RowPrice
from verifier_service.responses import SessionResponses
from verifier_service.scheduling.step_candidates import StepCandidates
from verifier_service.sessions.draft_timing import DraftGain
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.speculation.controller import (
    BatchProfile,
    Controllers,
    ModeStats,
    SpeculationController,
)
from verifier_service.speculation.eligibility import LOCAL_MODELS, Eligibility

HEADS, LOCAL_MODEL, NGRAM = (
    frozenset({drafter}) for drafter in (CandidateSource.HEADS, CandidateSource.LOCAL_MODEL, CandidateSource.NGRAM)
)


class Model:
    """A model inside the verifier that may propose for every session."""

    works = True

    def __init__(self, drafter: CandidateSource) -> None:
        self.drafter = drafter

    def serves(self, session: VerifierSession) -> bool:
        return True


def decisions(client: Client) -> list[Decision]:
    return [decision for result in client.mail.results for decision in result.decisions]


def reasons(client: Client) -> Counter[Without | None]:
    return Counter(decision.without for decision in decisions(client))


def test_each_step_of_a_text_has_a_decision() -> None:
    loop = step_loop(TextEngine(40), FREE, controller=Decided(Mode.REMOTE_DRAFT))
    client = Client(loop, [3, 4, 5], 20, policy=Policy(REMOTE, 8, 0.0))
    loop.turn()
    client.read()
    client.offer(right=3)
    run(loop, client)
    steps = sum(result.steps for result in client.mail.results)
    assert reasons(client) == {Without.PROMPT: 1, None: 1, Without.NOTHING_PROPOSED: steps - 2}
    assert {decision.mode for decision in decisions(client)} == {"remote_draft"}
    assert loop.stats.decisions.without == dict.fromkeys(map(str, Without), 0) | {
        "prompt": 1,
        "nothing_proposed": steps - 2,
    }
    assert sum(loop.stats.sources.values()) == loop.stats.committed


def test_a_candidate_that_is_not_worth_its_row_is_told_with_its_price() -> None:
    loop = step_loop(TextEngine(40), DEAR, controller=Decided(Mode.REMOTE_DRAFT))
    client = Client(loop, [3, 4, 5], 3, policy=Policy(REMOTE, 8, 0.0))
    loop.turn()
    client.offer(right=1)
    loop.turn()
    (_, decision) = decisions(client)
    assert decision.without is Without.ROW_COST
    assert decision.row == pytest.approx(10.0)
    assert decision.break_even == pytest.approx(10 / 11)
    assert decision.best == pytest.approx(math.exp(-0.1), rel=0.01)


@pytest.mark.parametrize("exploring", [False, True])
def test_a_candidate_that_was_worth_its_row_is_not_told_as_too_dear(exploring: bool) -> None:
    """Drafters get the value 0.1, so that there are candidates to try; this step chose by its own row prices."""
    prices = [RowPrice(1e-3, 0.3), RowPrice(1e-3, 0.9)]
    step = StepCandidates([[], []], [None, None], prices, 0.1, exploring)
    assert step.why_none(0, 0.82) is (Without.PROBED if exploring else Without.NO_ROOM)
    assert step.why_none(1, 0.82) is Without.ROW_COST


@pytest.mark.parametrize(
    ("policy", "mode", "without", "told"),
    [
        (Policy(NO_DRAFTERS, 8, 0.0), Mode.REMOTE_DRAFT, Without.NO_DRAFTER, "off"),
        (Policy(OWN_DRAFTERS, 8, 0.0), Mode.OFF, Without.PLAIN_FASTER, "off"),
        (Policy(NO_DRAFTERS, 8, 0.0, why_none=Without.OFF_BY_DEFAULT), Mode.OFF, Without.OFF_BY_DEFAULT, "off"),
        (Policy(REMOTE, 8, 0.0), Mode.NGRAM, Without.PLAIN_FASTER, "off"),
        (Policy(HEADS, 8, 0.0), Mode.NGRAM, Without.HEADS_NOT_LOADED, "off"),
        (Policy(HEADS, 8, 0.0), Mode.OFF, Without.HEADS_NOT_LOADED, "off"),
        (Policy(HEADS, 8, 0.0, forced=True), Mode.OFF, Without.HEADS_NOT_LOADED, "forced"),
        (Policy(LOCAL_MODEL, 8, 0.0), Mode.REMOTE_DRAFT, Without.LOCAL_MODEL_NOT_LOADED, "off"),
        (Policy(HEADS | NGRAM, 8, 0.0), Mode.OFF, Without.PLAIN_FASTER, "off"),
    ],
)
def test_a_session_without_drafters_says_who_left_them_out(
    policy: Policy, mode: Mode, without: Without, told: str
) -> None:
    loop = step_loop(TextEngine(40), FREE, controller=Decided(mode))
    client = Client(loop, [3], 6, policy=policy)
    run(loop, client)
    assert set(reasons(client)) == {without}
    assert {decision.mode for decision in decisions(client)} == {told}


@pytest.mark.parametrize(
    ("policy", "mode"),
    [
        (Policy(OWN_DRAFTERS, 8, 0.0), Mode.OFF),
        (Policy(REMOTE, 8, 0.0), Mode.NGRAM),
    ],
)
def test_a_mode_that_is_only_tried_is_not_told_as_faster(policy: Policy, mode: Mode) -> None:
    controller = Decided(mode)
    loop = step_loop(TextEngine(40), FREE, controller=controller)
    session = Client(loop, [3], 6, policy=policy).session
    eligibility = Eligibility(Controllers(shared=controller), None)
    assert eligibility.why_plain(session) is Without.PLAIN_FASTER
    controller.probing = True
    assert eligibility.why_plain(session) is Without.PROBED


def test_the_controller_says_which_modes_it_only_tries() -> None:
    """The first window measures the likeliest mode, which is no probe; the next one probes another mode."""
    controller, batch = SpeculationController(), BatchProfile(1, True, True, False)
    seen = list[tuple[bool, Mode]]()
    for step in range(2000):
        controller.select(batch, step * 0.01)
        seen.append((controller.probing, controller.mode))
        controller.update(batch, speculated=True, tokens=2, seconds=0.01, plain_rate=100.0)
    assert seen[0] == (False, Mode.REMOTE_DRAFT)
    assert {mode for probing, mode in seen if probing} >= {Mode.NGRAM}
    assert {mode for probing, mode in seen if not probing} == {Mode.REMOTE_DRAFT}


@pytest.mark.parametrize(
    ("drafter", "slower", "failed"),
    [
        (CandidateSource.HEADS, Without.HEADS_SLOWER, Without.HEADS_FAILED),
        (CandidateSource.LOCAL_MODEL, Without.LOCAL_MODEL_SLOWER, Without.LOCAL_MODEL_FAILED),
    ],
)
@pytest.mark.parametrize("mode", [Mode.OFF, Mode.NGRAM])
def test_a_model_that_its_mode_excludes_is_named(
    drafter: CandidateSource, slower: Without, failed: Without, mode: Mode
) -> None:
    loop, model = step_loop(TextEngine(40)), Model(drafter)
    eligibility = Eligibility(Controllers(shared=Decided(mode)), model)
    alone, beside = (
        Client(loop, [3], policy=Policy(frozenset({drafter}) | others, 8, 0.0)).session
        for others in (NO_DRAFTERS, NGRAM)
    )
    excluded = eligibility.why_plain if mode is Mode.OFF else eligibility.why_nothing
    assert excluded(alone) is slower
    assert excluded(beside) is (Without.PLAIN_FASTER if mode is Mode.OFF else Without.NOTHING_PROPOSED)
    assert eligibility.decision(alone).mode == "off"
    assert eligibility.decision(beside).mode == mode.value
    model.works = False
    assert excluded(alone) is failed


@pytest.mark.parametrize("mode", LOCAL_MODELS.values())
def test_the_mode_is_named_after_the_model_that_it_uses(mode: Mode) -> None:
    loop = step_loop(TextEngine(40))
    (drafter,) = (drafter for drafter, its in LOCAL_MODELS.items() if its is mode)
    eligibility = Eligibility(Controllers(), Model(drafter))
    alone, other = (
        Client(loop, [3], policy=Policy(drafters, 8, 0.0)).session for drafters in (frozenset({drafter}), NGRAM)
    )
    for sessions, modes in (([alone], [mode, Mode.NGRAM, Mode.OFF]), ([other], [Mode.NGRAM, Mode.OFF])):
        profile = eligibility.profile(sessions)
        assert profile is not None
        assert profile.modes == modes
    decided = Eligibility(Controllers(shared=Decided(mode)), Model(drafter))
    assert [decided.decision(session).mode for session in (alone, other)] == [mode.value, "ngram"]
    assert decided.why_nothing(alone) is Without.NOTHING_PROPOSED


def test_a_draft_that_rests_is_told() -> None:
    loop = step_loop(TextEngine(40), FREE, controller=Decided(Mode.REMOTE_DRAFT))
    client = Client(loop, [3], 6, policy=Policy(REMOTE, 8, 0.0))
    client.session.draft_gain = DraftGain()
    while client.session.draft_gain.helps:
        client.session.draft_gain.observe(0)
    run(loop, client)
    assert set(reasons(client)) == {Without.DRAFT_GAINS_NOTHING}


@pytest.mark.parametrize("forced", [False, True])
def test_a_session_forced_to_speculate_offers_its_best_candidate_at_any_price(forced: bool) -> None:
    loop = step_loop(TextEngine(40), DEAR, controller=Decided(Mode.REMOTE_DRAFT))
    policy = Policy(REMOTE, 8, 0.0, forced=forced)
    client = Client(loop, [3, 4, 5], 12, sampling=NO_BAD, policy=policy)
    loop.turn()
    while not client.over:
        client.read()
        client.offer(right=2)
        loop.turn()
    assert client.tokens == client.want
    later = client.mail.results[1:-1]
    assert {result.offered for result in later} == {int(forced)}
    assert {decision.mode for decision in decisions(client)} == {"forced" if forced else "remote_draft"}


def test_a_commit_has_the_decisions_of_its_steps() -> None:
    result = VerifyResult(5, 2, [7, 8], [4, 4], steps=1, decisions=[Decision("ngram")])
    result.join(VerifyResult(7, 0, [9], [4], decisions=[Decision("off", Without.ROW_COST, 0.002, 0.5, 0.2)]))
    result.join(VerifyResult(8, 0, [9], [4], decisions=[Decision("off", Without.ROW_COST, 0.004, 0.7, 0.4)]))
    make = SessionResponses(Timeline())
    told = make.commit(result, CommitDetails(0.0, 0.0, 0.0, 0.0, rates={"off": 90.0})).commit.decisions
    assert (dict(told.modes), dict(told.without)) == ({"ngram": 1, "off": 2}, {"row_cost": 2})
    assert (told.row_us, told.break_even, told.best_candidate) == pytest.approx((3000.0, 0.6, 0.3))
    assert dict(told.mode_rates) == {"off": 90.0}
    assert make.commit(VerifyResult(5, 0), CommitDetails(0.0, 0.0, 0.0, 0.0)).commit == verifier_pb2.Commit(
        committed=model_pb2.Committed(base=5),
        steps=1,
        min_candidate_probability=1.0,
        decisions=model_pb2.SpeculationDecisions(),
    )


def test_the_rates_of_modes_are_told_as_a_new_value() -> None:
    stats = ModeStats(DEFAULTS.controller, Mode.NGRAM, {})
    assert stats.reported_rates is None
    for _ in range(100):
        stats.update(2, 0.01, 100.0, speculated=True)
    first = stats.reported_rates
    assert first == pytest.approx({"ngram": 200.0})
    for _ in range(100):
        stats.update(1, 0.01, 100.0, speculated=True)
    assert stats.reported_rates is not first
    assert first == pytest.approx({"ngram": 200.0})
