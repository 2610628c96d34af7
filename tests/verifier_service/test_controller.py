"""The controller finds the best mode, keeps it, and probes the others less and less often."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from verifier_service.backend.result import Mode
from verifier_service.settings.tuning import DEFAULTS
from verifier_service.speculation.controller import (
    BatchProfile,
    SpeculationController,
)

STEP = 0.01

TUNING = DEFAULTS.controller


@dataclass
class Pod:
    """Simulated steps of a pod with a different token rate in each mode."""

    controller: SpeculationController
    drafted: float
    plain: float
    local: float = 0.0
    own: float | None = None  # rate with a model inside the verifier; None: there is none
    model: Mode = Mode.LOCAL_DRAFT  # the mode of this model
    expected: float | None = None  # estimated rate of plain decoding, if not the true one
    has_drafts: bool = True
    guesses: bool = True
    speculates: bool = True  # has candidates to verify
    shares_cores: bool = True  # with drafts
    step: float = STEP  # seconds

    def run(self, seconds: float, sessions: int = 4, *, drawn: bool = False) -> dict[Mode, float]:
        """Run for `seconds`; return each mode's share of the time."""
        spent = dict.fromkeys(Mode, 0.0)
        rates = {
            Mode.REMOTE_DRAFT: self.drafted,
            self.model: self.own or 0.0,
            Mode.NGRAM: self.local,
            Mode.OFF: self.plain,
        }
        own = None if self.own is None else self.model
        for _ in range(max(1, round(seconds / self.step))):
            mode = self.controller.mode
            spent[mode] += self.step / seconds
            self.controller.update(
                BatchProfile(sessions, self.has_drafts, self.guesses, drawn, own),
                speculated=mode is not Mode.OFF
                and (self.speculates or (mode is Mode.REMOTE_DRAFT and self.shares_cores)),
                tokens=round(rates[mode] * self.step),
                seconds=self.step,
                plain_rate=self.plain if self.expected is None else self.expected,
            )
        return spent


def test_speculation_that_pays_is_never_interrupted_for_plain_decoding() -> None:
    assert Pod(SpeculationController(), drafted=3000, plain=1000).run(100)[Mode.OFF] == 0


def test_the_verifiers_own_candidates_are_tried_now_and_then() -> None:
    spent = Pod(SpeculationController(), drafted=3000, local=2000, plain=1000).run(300)
    assert 0 < spent[Mode.NGRAM] < 0.03
    assert spent[Mode.REMOTE_DRAFT] > 0.97


@pytest.mark.parametrize("best", list(Mode))
def test_the_best_mode_is_found(best: Mode) -> None:
    drafted, plain, local, own = (
        2000.0 if best in modes else 1000.0
        for modes in ({Mode.REMOTE_DRAFT}, {Mode.OFF}, {Mode.NGRAM}, {Mode.LOCAL_DRAFT, Mode.HEADS})
    )
    model = Mode.HEADS if best is Mode.HEADS else Mode.LOCAL_DRAFT
    pod = Pod(SpeculationController(), drafted, plain, local, own, model)
    pod.run(30)
    assert pod.controller.mode is best
    assert pod.run(300)[best] > 0.95


def test_a_draft_of_its_own_is_tried_only_where_there_is_one() -> None:
    assert (
        Pod(SpeculationController(), drafted=0, local=2000, plain=1000, has_drafts=False).run(300)[Mode.LOCAL_DRAFT]
        == 0
    )
    found = Pod(SpeculationController(), drafted=0, local=2000, own=3000, plain=1000, has_drafts=False).run(300)
    assert found[Mode.LOCAL_DRAFT] > 0.95
    unasked = Pod(SpeculationController(), drafted=2000, own=3000, plain=1000, guesses=False)
    assert unasked.run(300)[Mode.LOCAL_DRAFT] == 0


@pytest.mark.parametrize("step", [0.002, 0.03, 0.1, 0.4])
def test_steps_may_take_any_time(step: float) -> None:
    """A window holds only five steps of 0.1 s."""
    pod = Pod(SpeculationController(), drafted=700, plain=1000, guesses=False, step=step)
    pod.run(TUNING.min_steps * step * 3 + TUNING.window_seconds)
    assert pod.run(300 * max(step, 0.1))[Mode.OFF] > 0.85


def test_a_pod_without_drafts_weighs_its_own_candidates() -> None:
    pod = Pod(SpeculationController(), drafted=0, local=1000, plain=2000, has_drafts=False)
    pod.run(3)
    assert pod.run(10)[Mode.OFF] > 0.9
    pod.local = 4000
    pod.run(2 * TUNING.longest_probe_pause)
    assert pod.run(1)[Mode.NGRAM] > 0.99


def test_an_expectation_that_was_too_high_is_found_out() -> None:
    pod = Pod(SpeculationController(), drafted=2000, plain=1000, expected=3000)
    pod.run(5)
    assert pod.run(300)[Mode.REMOTE_DRAFT] > 0.95


def test_it_comes_back_when_it_pays_again() -> None:
    pod = Pod(SpeculationController(), drafted=1000, plain=2000)
    pod.run(20)
    pod.drafted = 4000
    pod.run(TUNING.longest_probe_pause)
    assert pod.run(20)[Mode.REMOTE_DRAFT] > 0.9


def test_a_machine_that_changes_its_speed_changes_nothing() -> None:
    """Every mode becomes half or twice as fast: old measurements must not be compared with new ones."""
    pod = Pod(SpeculationController(), drafted=2000, local=1500, plain=1000)
    for factor in (0.5, 2.0) * 6:
        pod.run(47)
        pod.drafted, pod.local, pod.plain = factor * pod.drafted, factor * pod.local, factor * pod.plain
        pod.run(2 * TUNING.window_seconds)
        assert pod.controller.mode in (Mode.REMOTE_DRAFT, Mode.NGRAM)
        assert pod.run(40)[Mode.REMOTE_DRAFT] > 0.9


def test_what_has_no_chance_is_seen_at_a_glance() -> None:
    pod = Pod(SpeculationController(), drafted=100, local=100, plain=1000)
    assert pod.run(1.0)[Mode.OFF] > 0.65
    assert pod.run(60.0)[Mode.OFF] > 0.95  # the first minute, with two hopeless modes to try
    assert pod.run(600.0)[Mode.OFF] > 0.98


def test_to_have_had_nothing_to_guess_is_not_held_against_it() -> None:
    """Without candidates a mode costs nothing, so it is kept."""
    pod = Pod(SpeculationController(), drafted=0, local=700, plain=1000, has_drafts=False, speculates=False)
    pod.run(STEP)
    assert pod.run(TUNING.first_probe_pause - TUNING.window_seconds)[Mode.NGRAM] > 0.99


def test_a_mode_that_has_next_to_nothing_to_verify_is_compared_with_plain_decoding() -> None:
    """A poor draft whose candidates are not worth a row still delays steps."""
    pod = Pod(SpeculationController(), drafted=900, plain=1000, expected=1100, guesses=False)
    pod.speculates = pod.shares_cores = False  # no step has candidates
    assert pod.run(TUNING.window_seconds)[Mode.OFF] == 0
    assert pod.run(60)[Mode.OFF] > 0.9


def test_a_draft_that_brings_nothing_costs_its_core() -> None:
    pod = Pod(SpeculationController(), drafted=700, local=700, plain=1000, speculates=False)
    pod.run((TUNING.min_steps + 2) * STEP)
    assert pod.controller.mode is not Mode.REMOTE_DRAFT
    elsewhere = Pod(SpeculationController(), drafted=700, local=700, plain=1000, speculates=False, shares_cores=False)
    elsewhere.run((TUNING.min_steps + 2) * STEP)
    assert elsewhere.controller.mode is Mode.REMOTE_DRAFT


def test_a_few_long_steps_tell_nothing() -> None:
    """Steps are long while drafts are reading the prompt."""

    def look(controller: SpeculationController) -> None:
        long = 2 * TUNING.early_stop_seconds / TUNING.min_steps
        controller.update(BatchProfile(16, True, True, False), speculated=True, tokens=0, seconds=long, plain_rate=500)

    controller = SpeculationController()
    for _ in range(TUNING.min_steps - 1):
        look(controller)
    assert controller.mode is Mode.REMOTE_DRAFT
    for _ in range(2):
        look(controller)
    assert controller.mode is not Mode.REMOTE_DRAFT


def test_a_draw_changes_nothing() -> None:
    pod = Pod(SpeculationController(), drafted=1000, plain=1020)
    pod.run(5)
    assert pod.controller.mode is Mode.REMOTE_DRAFT


def test_each_number_of_sessions_has_its_own() -> None:
    controller = SpeculationController()
    alone, many = Pod(controller, drafted=300, plain=100), Pod(controller, drafted=1000, plain=2000)
    many.run(5, sessions=40)
    assert controller.mode is Mode.OFF
    assert alone.run(5, sessions=1)[Mode.REMOTE_DRAFT] > 0.9
    many.run(STEP, sessions=40)
    assert controller.mode is Mode.OFF  # remembered


def test_what_greedy_texts_teach_is_not_applied_to_drawn_ones() -> None:
    controller = SpeculationController()
    greedy = Pod(controller, drafted=3000, local=5000, plain=1000)
    drawn = Pod(controller, drafted=500, local=800, plain=1000)
    for _ in range(5):
        greedy.run(5)
        drawn.run(5, drawn=True)
    greedy.run(STEP)
    assert greedy.run(5)[Mode.NGRAM] > 0.9
    drawn.run(STEP, drawn=True)
    assert drawn.run(5, drawn=True)[Mode.OFF] > 0.8


def test_what_sessions_do_not_allow_is_not_tried() -> None:
    controller = SpeculationController()
    drafts, both = (
        Pod(controller, drafted=2000, plain=1000, guesses=False),
        Pod(controller, drafted=500, local=3000, plain=1000),
    )
    both.run(30)
    assert controller.mode is Mode.NGRAM
    drafts.run(STEP)
    assert drafts.run(100)[Mode.REMOTE_DRAFT] > 0.99
    both.run(STEP)
    assert both.run(10)[Mode.NGRAM] > 0.9  # remembered


def test_trials_become_rarer() -> None:
    pod = Pod(SpeculationController(), drafted=1000, plain=2000)
    early = pod.run(4 * TUNING.first_probe_pause)
    pod.run(300)
    assert 1 - pod.run(4 * TUNING.longest_probe_pause)[Mode.OFF] < (1 - early[Mode.OFF]) / 3


@pytest.mark.parametrize("stay", [0.02, 0.1])
def test_a_measurement_goes_on_where_it_was_left(stay: float) -> None:
    """Sessions come and go: their number crosses a power of two long before a window ends."""
    pod = Pod(SpeculationController(), drafted=1000, plain=2000)
    for _ in range(round(7 * TUNING.window_seconds / stay)):  # each profile is decided; no further probe is due yet
        pod.run(stay, sessions=8)
        pod.run(stay, sessions=9)
    for sessions in (8, 9):
        pod.run(STEP, sessions=sessions)
        assert pod.controller.mode is Mode.OFF


def test_a_larger_batch_goes_on_as_a_smaller_one_did() -> None:
    controller = SpeculationController()
    Pod(controller, drafted=100, local=200, plain=1000).run(5, sessions=4)
    larger = Pod(controller, drafted=500, local=600, plain=2000)
    larger.run(STEP, sessions=16)
    assert larger.run(1.0, sessions=16)[Mode.OFF] > 0.99
    larger.drafted = 4000
    larger.run(TUNING.longest_probe_pause, sessions=16)
    assert larger.run(1.0, sessions=16)[Mode.REMOTE_DRAFT] > 0.99


def test_a_smaller_batch_hopes_whatever_larger_ones_found() -> None:
    controller = SpeculationController()
    Pod(controller, drafted=100, local=200, plain=1000).run(5, sessions=16)
    smaller = Pod(controller, drafted=2000, local=600, plain=1000)
    smaller.run(STEP, sessions=4)
    assert smaller.run(5.0, sessions=4)[Mode.REMOTE_DRAFT] > 0.9


@pytest.mark.parametrize("drafted", [0.0, 300.0, 700.0])
def test_trials_cost_a_small_part_of_all_tokens(drafted: float) -> None:
    pod = Pod(SpeculationController(), drafted=drafted, plain=1000, guesses=False)
    pod.run(1.0)
    spent = pod.run(20.0)[Mode.REMOTE_DRAFT]
    assert 0 < spent * (1.0 - drafted / 1000) < 0.06


def test_another_batch_is_served_in_its_own_mode_from_its_first_step_on() -> None:
    """Even if that step has prompts and measures nothing."""
    controller = SpeculationController()
    Pod(controller, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(controller, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    now = 100.0
    for sessions, mode in ((1, Mode.REMOTE_DRAFT), (16, Mode.OFF), (1, Mode.REMOTE_DRAFT)):
        now += 2 * TUNING.linger_seconds
        controller.select(BatchProfile(sessions, True, False, False), now)
        assert controller.mode is mode


def test_sessions_that_have_just_left_count_for_another_while() -> None:
    controller = SpeculationController()
    one, many = BatchProfile(1, True, False, False), BatchProfile(16, True, False, False)
    Pod(controller, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(controller, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    controller.select(many, 100.0)
    for now, mode in (
        (100.0 + 0.9 * TUNING.linger_seconds, Mode.OFF),
        (100.0 + 1.1 * TUNING.linger_seconds, Mode.REMOTE_DRAFT),
        (200.0, Mode.REMOTE_DRAFT),
    ):
        assert controller.mode_for(one, now) is mode
        controller.select(one, now)
        assert controller.mode is mode


def test_what_is_done_for_those_who_have_left_is_no_measurement_of_another_mode() -> None:
    controller = SpeculationController()
    Pod(controller, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(controller, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    controller.select(BatchProfile(16, True, False, False), 100.0)
    for _ in range(1000):  # plain steps of one session; drafts would have brought 3000 tokens a second
        controller.select(BatchProfile(1, True, False, False), 100.1)
        controller.update(
            BatchProfile(1, True, False, False), speculated=False, tokens=1, seconds=0.001, plain_rate=1000
        )
        assert controller.mode is Mode.OFF
    assert controller.mode_for(BatchProfile(1, True, False, False), 200.0) is Mode.REMOTE_DRAFT


def test_a_batch_that_some_have_left_goes_on_as_before() -> None:
    controller = SpeculationController()
    Pod(controller, drafted=3000, plain=1000, guesses=False).run(5, sessions=1)
    Pod(controller, drafted=700, plain=2000, guesses=False).run(2, sessions=16)
    assert controller.mode_for(BatchProfile(15, True, False, False), 0.0) is Mode.OFF
    assert controller.mode_for(BatchProfile(8, True, False, False), 0.0) is Mode.OFF
    assert (
        controller.mode_for(BatchProfile(4, True, False, False), 0.0) is Mode.REMOTE_DRAFT
    )  # much smaller: speculation is expected to pay


@pytest.mark.parametrize("most", [16, 64])
def test_what_is_left_of_a_full_batch_is_of_its_kind(most: int) -> None:
    """Bursts start with `most` sessions, and a quarter leaves after the first step. The controller learns and chooses
    under the full batch's profile."""
    controller = SpeculationController()
    now = 0.0
    for burst in range(10):
        for step in range(100):
            batch = BatchProfile(most if step == 0 else most - most // 4, True, False, False)
            controller.select(batch, now)
            if burst == 9:
                assert controller.mode is Mode.OFF
            tokens = 7 if controller.mode is Mode.REMOTE_DRAFT else 20
            controller.update(
                batch, speculated=controller.mode is Mode.REMOTE_DRAFT, tokens=tokens, seconds=STEP, plain_rate=2000
            )
            now += STEP
        now += 2 * TUNING.linger_seconds


def test_a_stall_during_a_probe_does_not_postpone_the_next_for_hours() -> None:
    """The process stands still for ten minutes in a step of the first probe; then the draft pays."""
    controller, batch, now, stalled = SpeculationController(), BatchProfile(1, True, False, False), 0.0, 0.0
    while now < 2000.0:
        controller.select(batch, now)
        mode = controller.mode
        seconds = 2 / (50.0 if mode is Mode.OFF else 100.0 if stalled else 25.0)
        if not stalled and now > 3 and mode is Mode.REMOTE_DRAFT:
            seconds = 600.0
            stalled = now + seconds
        now += seconds
        controller.update(batch, speculated=mode is not Mode.OFF, tokens=2, seconds=seconds, plain_rate=51.0)
        if stalled and now > stalled + 60 and mode is Mode.REMOTE_DRAFT:
            return
    pytest.fail("the draft is not tried again")
