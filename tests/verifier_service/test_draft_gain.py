"""A text whose draft brings nothing pauses it for a while; what is learned stays within its tenant."""

from __future__ import annotations

from itertools import count

import pytest

from specdec.decoding.speculation import CandidateSource
from tests.verifier_service.fakes import Client, Decided, TextEngine, run, step_loop
from verifier_service.backend.request import Policy
from verifier_service.backend.result import Mode
from verifier_service.sessions import draft_timing
from verifier_service.sessions.draft_timing import DraftGain, TenantGains
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.speculation.controller import MAX_GROUPS, BatchProfile, Controllers

TUNING = DEFAULTS.draft_gain
REMOTE = frozenset({CandidateSource.REMOTE})


def steps_until_rest(gain: DraftGain) -> int:
    for step in count(1):
        gain.observe(0)
        if not gain.helps:
            return step
    raise AssertionError


def steps_of_rest(gain: DraftGain) -> int:
    for step in count(1):
        gain.rest()
        if gain.helps:
            return step
    raise AssertionError


def test_a_draft_without_an_accepted_candidate_is_tried_more_and_more_rarely() -> None:
    gain = DraftGain()
    assert steps_until_rest(gain) in (16, 17)  # the quotient is rounded
    rests = []
    for _ in range(6):
        rests.append(steps_of_rest(gain))
        assert steps_until_rest(gain) in (4, 5)
    assert rests == [64, 128, 256, 512, 1024, 1024]


@pytest.mark.parametrize("every", [1, 3, 8])
def test_a_draft_that_helps_now_and_then_is_kept(every: int) -> None:
    gain = DraftGain()
    for step in range(2000):
        gain.observe(int(step % every == 0))
        assert gain.helps


def test_a_new_text_expects_what_its_tenants_texts_had() -> None:
    gains = TenantGains()
    for _ in range(500):
        gains.observe("useless", 0)
        gains.observe("helped", 2)
    assert steps_until_rest(DraftGain(gains.of("useless"))) in (4, 5)
    assert steps_until_rest(DraftGain(gains.of("helped"))) > 30
    assert gains.of("unknown") is None
    for number in range(draft_timing.MAX_TENANTS):
        gains.observe(str(number), 1)
    assert gains.of("useless") is None


def test_a_useless_draft_is_paused_and_tried_again() -> None:
    """Commits pause the draft; a session with forced speculation keeps its draft active."""
    engine = TextEngine(64)
    engine.bad = -1
    loop = step_loop(engine, controller=Decided(Mode.REMOTE_DRAFT))
    useless = Client(loop, [3, 4], 200, tenant="a")
    helped = Client(loop, [3, 5], 200, tenant="b")
    forced = Client(loop, [3, 6], 200, tenant="a", policy=Policy(REMOTE, 8, 0.0, forced=True))
    uses = loop._speculation.eligibility.uses_remote_draft
    rested = 0
    for _ in range(150):
        for client in (useless, helped, forced):
            client.read()
        if helped.session.tree.base > 2:
            helped.offer(right=1)
            useless.offer(right=0, wrong=[(useless.want[len(useless.tokens)] + 1) % 11])
        loop.turn()
        assert uses(helped.session) or helped.over
        assert uses(forced.session)
        rested += not uses(useless.session)
        if helped.over or useless.over:
            break
    assert rested >= 20
    assert any(not details.outlook.drafting_wanted for details in useless.mail.details)
    gains = loop._speculation.tenant_gains
    assert (gains.of("a") or 0.0) < TUNING.first_gain < (gains.of("b") or 0.0)
    run(loop, useless, helped, forced)
    assert [client.tokens for client in (useless, helped, forced)] == [c.want for c in (useless, helped, forced)]


def test_each_tenant_has_its_own_modes() -> None:
    loop = step_loop(TextEngine(40))
    one, other = (Client(loop, [3, 4], tenant=tenant).session for tenant in ("a", "b"))
    known = Controllers()
    batch = BatchProfile(1, True, False, False, exempt=1)
    for _ in range(500):
        for controller, sessions in known.select([one, other]):
            controller.select(batch, 1.0)
            tokens = 3 if sessions == [other] else 1
            drafted = controller.mode is Mode.REMOTE_DRAFT
            controller.update(
                batch,
                speculated=drafted,
                tokens=tokens if drafted else 1,
                seconds=0.013 if drafted else 0.01,
                plain_rate=100.0,
            )
    assert known.of(one).mode is Mode.OFF
    assert known.of(other).mode is Mode.REMOTE_DRAFT
    third = Client(loop, [3, 4], tenant="c").session
    assert known.of(third).mode is Mode.REMOTE_DRAFT  # other tenants' results have no influence


def test_what_is_known_of_tenants_is_bounded() -> None:
    loop = step_loop(TextEngine(40))
    known = Controllers()
    first = Client(loop, [3, 4], tenant="first").session
    ((controller, _),) = known.select([first])
    for number in range(MAX_GROUPS):
        assert known.of(first) is controller
        known.select([Client(loop, [3, 4], tenant=str(number)).session])
    assert known.of(first) is not controller
