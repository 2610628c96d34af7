"""The guard finds the best way, keeps to it, and looks again, less and less often."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from verifier_service.guard import EPOCH, FEW, FIRST_PAUSE, GLANCE, HOLD, LONGEST_PAUSE, Crowd, Guard, Way

STEP = 0.01


@dataclass
class Pod:
    """Steps of a pod on which tokens come at another rate in each way."""

    guard: Guard
    drafted: float
    plain: float
    local: float = 0.0
    own: float | None = None  # of a draft of its own, if it has one
    expected: float | None = None  # of plain decoding; what it brings indeed, if not given
    has_drafts: bool = True
    guesses: bool = True
    speculates: bool = True  # finds anything to verify
    shares_cores: bool = True  # with drafts
    step: float = STEP  # seconds

    def run(self, seconds: float, sessions: int = 4, *, drawn: bool = False) -> dict[Way, float]:
        """For so long; the part of the time that each way had."""
        spent = dict.fromkeys(Way, 0.0)
        rates = {Way.DRAFTED: self.drafted, Way.OWN: self.own or 0.0, Way.LOCAL: self.local, Way.PLAIN: self.plain}
        for _ in range(max(1, round(seconds / self.step))):
            way = self.guard.way
            spent[way] += self.step / seconds
            self.guard.observe(
                Crowd(sessions, self.has_drafts, self.guesses, drawn, self.own is not None),
                taken=way is not Way.PLAIN and (self.speculates or (way is Way.DRAFTED and self.shares_cores)),
                tokens=round(rates[way] * self.step),
                seconds=self.step,
                plain_rate=self.plain if self.expected is None else self.expected,
            )
        return spent


def test_speculation_that_pays_is_never_interrupted_for_plain_decoding() -> None:
    assert Pod(Guard(), drafted=3000, plain=1000).run(100)[Way.PLAIN] == 0


def test_the_verifiers_own_guesses_are_tried_now_and_then() -> None:
    spent = Pod(Guard(), drafted=3000, local=2000, plain=1000).run(300)
    assert 0 < spent[Way.LOCAL] < 0.03
    assert spent[Way.DRAFTED] > 0.97


@pytest.mark.parametrize("best", list(Way))
def test_the_best_way_is_found(best: Way) -> None:
    drafted, plain, local, own = (
        2000.0 if way is best else 1000.0 for way in (Way.DRAFTED, Way.PLAIN, Way.LOCAL, Way.OWN)
    )
    pod = Pod(Guard(), drafted, plain, local, own)
    pod.run(30)
    assert pod.guard.way is best
    assert pod.run(300)[best] > 0.95


def test_a_draft_of_its_own_is_tried_only_where_there_is_one() -> None:
    assert Pod(Guard(), drafted=0, local=2000, plain=1000, has_drafts=False).run(300)[Way.OWN] == 0
    found = Pod(Guard(), drafted=0, local=2000, own=3000, plain=1000, has_drafts=False).run(300)
    assert found[Way.OWN] > 0.95
    unasked = Pod(Guard(), drafted=2000, own=3000, plain=1000, guesses=False)
    assert unasked.run(300)[Way.OWN] == 0


@pytest.mark.parametrize("step", [0.002, 0.03, 0.1, 0.4])
def test_steps_may_take_any_time(step: float) -> None:
    """Of those that last a tenth of a second an epoch has five."""
    pod = Pod(Guard(), drafted=700, plain=1000, guesses=False, step=step)
    pod.run(FEW * step * 3 + EPOCH)
    assert pod.run(300 * max(step, 0.1))[Way.PLAIN] > 0.85


def test_a_pod_without_drafts_weighs_its_own_guesses() -> None:
    pod = Pod(Guard(), drafted=0, local=1000, plain=2000, has_drafts=False)
    pod.run(3)
    assert pod.run(10)[Way.PLAIN] > 0.9
    pod.local = 4000
    pod.run(2 * LONGEST_PAUSE)
    assert pod.run(1)[Way.LOCAL] > 0.99


def test_an_expectation_that_was_too_high_is_found_out() -> None:
    pod = Pod(Guard(), drafted=2000, plain=1000, expected=3000)
    pod.run(5)
    assert pod.run(300)[Way.DRAFTED] > 0.95


def test_it_comes_back_when_it_pays_again() -> None:
    pod = Pod(Guard(), drafted=1000, plain=2000)
    pod.run(20)
    pod.drafted = 4000
    pod.run(LONGEST_PAUSE)
    assert pod.run(20)[Way.DRAFTED] > 0.9


def test_a_machine_that_changes_its_pace_changes_nothing() -> None:
    """Every way is half as fast, twice as fast: what was measured long ago must not be compared with today."""
    pod = Pod(Guard(), drafted=2000, local=1500, plain=1000)
    for factor in (0.5, 2.0) * 6:
        pod.run(47)
        pod.drafted, pod.local, pod.plain = factor * pod.drafted, factor * pod.local, factor * pod.plain
        pod.run(2 * EPOCH)
        assert pod.guard.way in (Way.DRAFTED, Way.LOCAL)
        assert pod.run(40)[Way.DRAFTED] > 0.9


def test_what_has_no_chance_is_seen_at_a_glance() -> None:
    pod = Pod(Guard(), drafted=100, local=100, plain=1000)
    assert pod.run(1.0)[Way.PLAIN] > 0.65
    assert pod.run(60.0)[Way.PLAIN] > 0.95  # its first minute, two such ways
    assert pod.run(600.0)[Way.PLAIN] > 0.98


def test_to_have_had_nothing_to_guess_is_not_held_against_it() -> None:
    """It has cost nothing."""
    pod = Pod(Guard(), drafted=0, local=700, plain=1000, has_drafts=False, speculates=False)
    pod.run(STEP)
    assert pod.run(FIRST_PAUSE - EPOCH)[Way.LOCAL] > 0.99


def test_a_draft_that_brings_nothing_costs_its_core() -> None:
    pod = Pod(Guard(), drafted=700, local=700, plain=1000, speculates=False)
    pod.run((FEW + 2) * STEP)
    assert pod.guard.way is not Way.DRAFTED
    elsewhere = Pod(Guard(), drafted=700, local=700, plain=1000, speculates=False, shares_cores=False)
    elsewhere.run((FEW + 2) * STEP)
    assert elsewhere.guard.way is Way.DRAFTED


def test_a_few_long_steps_tell_nothing() -> None:
    """Drafts read the prompt meanwhile."""

    def look(guard: Guard) -> None:
        long = 2 * GLANCE / FEW
        guard.observe(Crowd(16, True, True, False), taken=True, tokens=0, seconds=long, plain_rate=500)

    guard = Guard()
    for _ in range(FEW - 1):
        look(guard)
    assert guard.way is Way.DRAFTED
    for _ in range(2):
        look(guard)
    assert guard.way is not Way.DRAFTED


def test_a_draw_changes_nothing() -> None:
    pod = Pod(Guard(), drafted=1000, plain=1020)
    pod.run(5)
    assert pod.guard.way is Way.DRAFTED


def test_each_number_of_sessions_has_its_own() -> None:
    guard = Guard()
    alone, crowd = Pod(guard, drafted=300, plain=100), Pod(guard, drafted=1000, plain=2000)
    crowd.run(5, sessions=40)
    assert guard.way is Way.PLAIN
    assert alone.run(5, sessions=1)[Way.DRAFTED] > 0.9
    crowd.run(STEP, sessions=40)
    assert guard.way is Way.PLAIN  # it remembers


def test_what_greedy_texts_teach_is_not_applied_to_drawn_ones() -> None:
    guard = Guard()
    greedy = Pod(guard, drafted=3000, local=5000, plain=1000)
    drawn = Pod(guard, drafted=500, local=800, plain=1000)
    for _ in range(5):
        greedy.run(5)
        drawn.run(5, drawn=True)
    greedy.run(STEP)
    assert greedy.run(5)[Way.LOCAL] > 0.9
    drawn.run(STEP, drawn=True)
    assert drawn.run(5, drawn=True)[Way.PLAIN] > 0.8


def test_what_sessions_do_not_allow_is_not_tried() -> None:
    guard = Guard()
    drafts, both = Pod(guard, drafted=2000, plain=1000, guesses=False), Pod(guard, drafted=500, local=3000, plain=1000)
    both.run(30)
    assert guard.way is Way.LOCAL
    drafts.run(STEP)
    assert drafts.run(100)[Way.DRAFTED] > 0.99
    both.run(STEP)
    assert both.run(10)[Way.LOCAL] > 0.9  # it remembers


def test_trials_become_rarer() -> None:
    pod = Pod(Guard(), drafted=1000, plain=2000)
    early = pod.run(4 * FIRST_PAUSE)
    pod.run(300)
    assert 1 - pod.run(4 * LONGEST_PAUSE)[Way.PLAIN] < (1 - early[Way.PLAIN]) / 3


@pytest.mark.parametrize("stay", [0.02, 0.1])
def test_a_measurement_goes_on_where_it_was_left(stay: float) -> None:
    """Sessions come and go: their number crosses a power of two long before an epoch is over."""
    pod = Pod(Guard(), drafted=1000, plain=2000)
    for _ in range(round(7 * EPOCH / stay)):  # each comes to a decision, and does not look again yet
        pod.run(stay, sessions=8)
        pod.run(stay, sessions=9)
    for sessions in (8, 9):
        pod.run(STEP, sessions=sessions)
        assert pod.guard.way is Way.PLAIN


def test_a_larger_crowd_goes_on_as_a_smaller_one_did() -> None:
    guard = Guard()
    Pod(guard, drafted=100, local=200, plain=1000).run(5, sessions=4)
    larger = Pod(guard, drafted=500, local=600, plain=2000)
    larger.run(STEP, sessions=16)
    assert larger.run(1.0, sessions=16)[Way.PLAIN] > 0.99
    larger.drafted = 4000
    larger.run(LONGEST_PAUSE, sessions=16)
    assert larger.run(1.0, sessions=16)[Way.DRAFTED] > 0.99


def test_a_smaller_crowd_hopes_whatever_larger_ones_found() -> None:
    guard = Guard()
    Pod(guard, drafted=100, local=200, plain=1000).run(5, sessions=16)
    smaller = Pod(guard, drafted=2000, local=600, plain=1000)
    smaller.run(STEP, sessions=4)
    assert smaller.run(5.0, sessions=4)[Way.DRAFTED] > 0.9


@pytest.mark.parametrize("drafted", [0.0, 300.0, 700.0])
def test_trials_cost_a_small_part_of_all_tokens(drafted: float) -> None:
    pod = Pod(Guard(), drafted=drafted, plain=1000, guesses=False)
    pod.run(1.0)
    spent = pod.run(20.0)[Way.DRAFTED]
    assert 0 < spent * (1.0 - drafted / 1000) < 0.06


def test_another_crowd_is_served_in_its_own_way_from_its_first_step_on() -> None:
    """Which is one over prompts, perhaps, that tells nothing."""
    guard = Guard()
    Pod(guard, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(guard, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    now = 100.0
    for sessions, way in ((1, Way.DRAFTED), (16, Way.PLAIN), (1, Way.DRAFTED)):
        now += 2 * HOLD
        guard.face(Crowd(sessions, True, False, False), now)
        assert guard.way is way


def test_sessions_that_have_just_left_count_for_another_while() -> None:
    guard = Guard()
    one, many = Crowd(1, True, False, False), Crowd(16, True, False, False)
    Pod(guard, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(guard, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    guard.face(many, 100.0)
    for now, way in ((100.0 + 0.9 * HOLD, Way.PLAIN), (100.0 + 1.1 * HOLD, Way.DRAFTED), (200.0, Way.DRAFTED)):
        assert guard.way_for(one, now) is way
        guard.face(one, now)
        assert guard.way is way


def test_what_is_done_for_those_who_have_left_is_no_measurement_of_another_way() -> None:
    guard = Guard()
    Pod(guard, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(guard, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    guard.face(Crowd(16, True, False, False), 100.0)
    for _ in range(1000):  # plain steps of one session; drafts would have brought 3000 tokens a second
        guard.face(Crowd(1, True, False, False), 100.1)
        guard.observe(Crowd(1, True, False, False), taken=False, tokens=1, seconds=0.001, plain_rate=1000)
        assert guard.way is Way.PLAIN
    assert guard.way_for(Crowd(1, True, False, False), 200.0) is Way.DRAFTED


def test_a_crowd_that_some_have_left_goes_on_as_before() -> None:
    guard = Guard()
    Pod(guard, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(guard, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    assert guard.way_for(Crowd(15, True, False, False), 0.0) is Way.PLAIN
    assert guard.way_for(Crowd(8, True, False, False), 0.0) is Way.PLAIN
    assert guard.way_for(Crowd(4, True, False, False), 0.0) is Way.DRAFTED  # much smaller: it is hoped to pay


@pytest.mark.parametrize("most", [16, 64])
def test_what_is_left_of_a_full_crowd_is_of_its_kind(most: int) -> None:
    """Crowds of as many as somebody has chosen, of whom the first soon leaves: all is learned, and used, for them."""
    guard = Guard()
    now = 0.0
    for burst in range(10):
        for step in range(100):
            crowd = Crowd(most if step == 0 else most - most // 4, True, False, False)
            guard.face(crowd, now)
            if burst == 9:
                assert guard.way is Way.PLAIN
            tokens = 7 if guard.way is Way.DRAFTED else 20
            guard.observe(crowd, taken=guard.way is Way.DRAFTED, tokens=tokens, seconds=STEP, plain_rate=2000)
            now += STEP
        now += 2 * HOLD
