"""Sessions with forced speculation do not affect how the mode of the others is measured and selected."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from specdec.decoding.lookahead import Lookahead
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule, Sampling
from specdec.decoding.speculation import OWN_DRAFTERS, CandidateSource
from tests.replay.deployment import made_up, record
from tests.replay.scenarios import ALWAYS, CONTRASTIVE, SCENARIOS, WARM, Request, Scenario
from tests.verifier_service.fakes import Client, TextEngine, step_loop
from verifier_service.backend.request import Policy
from verifier_service.backend.result import Mode
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.speculation.controller import BatchProfile, Controllers, SpeculationController
from verifier_service.speculation.eligibility import Eligibility

FORCED = Request(prompt=5, tokens=150, sampling=WARM, delay=0, **ALWAYS)
CONTRASTED = Request(prompt=5, tokens=150, rule=CONTRASTIVE, delay=0, **ALWAYS)
WINDOWED = Request(
    prompt=5, tokens=150, policy={"drafters": [2, 3], "lookahead": {"window": 3, "ngram": 3, "guesses": 2}}
)


def modes(scenario: Scenario) -> list[str]:
    """Return the mode of each step during the first request."""
    found = []
    for line in record(scenario, made_up).lines:
        found += re.findall(r"mode=(\S+)", line)
        if re.search(r" 0 commit .*finish=", line):
            break
    return found


@pytest.mark.parametrize(
    ("exempt", "draft_base"),
    [
        pytest.param(FORCED, 0.02, id="forced"),
        # CONTRASTIVE sits out steps while its draft is late.
        pytest.param(CONTRASTED, 0.0001, id="contrastive", marks=pytest.mark.verify),
        pytest.param(WINDOWED, 0.02, id="window", marks=pytest.mark.verify),
    ],
)
def test_a_mode_that_does_not_pay_is_left_beside_a_session_that_is_exempt(exempt: Request, draft_base: float) -> None:
    """Drafts are wrong: without the exempt session, the others soon decode plainly."""
    wrong = SCENARIOS["wrong drafts"]
    assert "off" in modes(replace(wrong, requests=(exempt, *wrong.requests), draft_base=draft_base, ticks=900))


def test_who_is_exempt_is_no_part_of_what_the_mode_decides() -> None:
    loop = step_loop(TextEngine(40))
    eligibility = Eligibility(Controllers(), None)
    remote, own = frozenset({CandidateSource.REMOTE}), frozenset({CandidateSource.NGRAM})
    drafted = Client(loop, [3, 4], policy=Policy(remote, 8, 0.0)).session
    plain = Client(loop, [3, 4], policy=Policy(frozenset(), 8, 0.0)).session
    forced = Client(loop, [3, 4], policy=Policy(remote | own, 8, 0.0, forced=True)).session
    window = Client(loop, [3, 4], policy=Policy(OWN_DRAFTERS, 8, 0.0, lookahead=Lookahead(4, 3, 4))).session
    contrastive = Client(loop, [3, 4], policy=Policy(remote, 8, 0.0)).session
    contrastive.request = replace(contrastive.request, sampler=RequestSampler(Sampling(), rule=Rule.CONTRASTIVE))
    assert eligibility.profile([drafted, plain]) == BatchProfile(2, True, False, False)
    assert eligibility.profile([drafted, forced, plain, window]) == BatchProfile(2, True, False, False, exempt=2)
    assert eligibility.profile([contrastive, drafted]) == BatchProfile(1, True, False, False, exempt=1)
    assert eligibility.profile([forced, window]) is None
    assert eligibility.profile([forced, plain]) is None


def learn(controller: SpeculationController, rates: dict[Mode, float], batch: BatchProfile, seconds: float) -> None:
    """Make steps of 10 ms."""
    for _ in range(round(seconds / 0.01)):
        mode = controller.mode
        tokens = round(0.01 * rates[mode])
        controller.update(batch, speculated=mode is not Mode.OFF, tokens=tokens, seconds=0.01, plain_rate=1000)


def test_what_is_learnt_beside_exempt_sessions_is_of_such_batches_only() -> None:
    controller = SpeculationController()
    alone, beside = BatchProfile(4, True, False, False), BatchProfile(4, True, False, False, exempt=1)
    controller.select(alone, 1.0)
    learn(controller, {Mode.REMOTE_DRAFT: 3000, Mode.OFF: 1000}, alone, 10)
    controller.select(beside, 11.0)
    assert controller.mode is Mode.REMOTE_DRAFT  # initially
    learn(controller, {Mode.REMOTE_DRAFT: 500, Mode.OFF: 1000}, beside, 10)
    assert controller.mode_for(alone, 30.0) is Mode.REMOTE_DRAFT
    assert controller.mode_for(beside, 30.0) is Mode.OFF


def test_an_exempt_session_that_sits_out_steps_does_not_change_the_mode() -> None:
    """As a CONTRASTIVE session does while its draft is late."""
    controller = SpeculationController()
    alone, beside = BatchProfile(4, True, False, False), BatchProfile(4, True, False, False, exempt=1)
    controller.select(beside, 1.0)
    learn(controller, {Mode.REMOTE_DRAFT: 500, Mode.OFF: 1000}, beside, 10)
    now = 11.0
    for batch in (beside, alone, alone, beside, alone):
        controller.select(batch, now)
        assert controller.mode is Mode.OFF
        learn(controller, {Mode.REMOTE_DRAFT: 500, Mode.OFF: 1000}, batch, 0.1)
        now += 0.1
    controller.select(alone, now + DEFAULTS.controller.linger_seconds)
    assert controller.mode is Mode.REMOTE_DRAFT
