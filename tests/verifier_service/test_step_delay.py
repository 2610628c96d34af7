"""Step delay: a step waits for candidates only while that pays for all sessions, and never past their patience."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier_service.scheduling.step_delay import delay_until
from verifier_service.sessions.draft_timing import DraftTiming, WaitEstimate

STEP = 0.010


def wait(
    draft_timing: DraftTiming, base: int, now: float, *, expected: float = 1.0, leaf: float = 1.0, patience: float = 1.0
) -> float | None:
    """Return the delay for a lone session at the end of a step."""
    wait_estimate = draft_timing.wait_estimate(
        base, now, expected=expected, leaf=leaf, break_even=0.0, patience=patience
    )
    return delay_until([wait_estimate], now, now, STEP)


def learned(delay: float, gap: float = 0.001) -> DraftTiming:
    """Return a draft timing for a draft that answers after `delay`, then every `gap`."""
    draft_timing = DraftTiming()
    for base in range(100):
        draft_timing.committed(base, float(base))
        draft_timing.arrived(base, base + delay)
        draft_timing.arrived(base, base + delay + gap)
    draft_timing.committed(100, 100.0)
    return draft_timing


class TestRoundTrip:
    def test_it_is_what_passed_while_the_draft_did_not_hold_the_text(self) -> None:
        draft_timing = DraftTiming()
        assert not draft_timing.round_trip
        for base in range(40):
            draft_timing.committed(base, float(base))
            draft_timing.arrived(base, base + 0.018 + 0.004, 0.004)
            draft_timing.arrived(base, base + 0.018 + 0.009, 0.009)
        assert draft_timing.round_trip == pytest.approx(0.018)

    def test_who_does_not_say_or_cannot_be_right_teaches_nothing(self) -> None:
        """A draft may report an impossible age: another verifier sent it this text before this one had the text."""
        draft_timing = DraftTiming()
        draft_timing.committed(5, 10.0)
        draft_timing.arrived(5, 10.1)
        draft_timing.arrived(5, 10.1, 3.0)
        draft_timing.arrived(4, 10.1, 0.05)
        assert not draft_timing.round_trip


class TestOneSession:
    def test_it_waits_for_a_quick_draft_with_nothing_in_hand(self) -> None:
        until = wait(learned(0.002), 100, 100.0)
        assert until is not None
        assert 100.002 < until <= 100.005

    def test_it_goes_on_waiting_while_messages_add_enough(self) -> None:
        draft_timing = learned(0.002, gap=0.001)
        draft_timing.arrived(100, 100.002)
        assert wait(draft_timing, 100, 100.002, expected=1.7, leaf=0.7) is not None
        assert wait(draft_timing, 100, 100.002, expected=3.0, leaf=0.05) is None

    def test_it_does_not_wait_when_the_step_is_full(self) -> None:
        assert wait(learned(0.002), 100, 100.0, expected=3.0, leaf=0.0) is None

    def test_a_slow_draft_is_not_waited_for(self) -> None:
        assert wait(learned(0.050), 100, 100.0) is None

    def test_a_draft_that_is_always_wrong_is_not_waited_for(self) -> None:
        draft_timing = learned(0.002)
        for _ in range(100):
            draft_timing.verified(0, corrected=True)
        assert wait(draft_timing, 100, 100.0) is None

    def test_patience_is_the_longest_wait(self) -> None:
        until = wait(learned(0.004), 100, 100.0, patience=0.003)
        assert until == 100.003
        assert wait(learned(0.004), 100, 100.004, patience=0.003) is None

    def test_a_wait_in_vain_teaches_at_once(self) -> None:
        draft_timing = learned(0.002)
        until = wait(draft_timing, 100, 100.0)
        assert until is not None
        assert wait(draft_timing, 100, until + 0.5) is None
        draft_timing.committed(101, 101.0)
        assert wait(draft_timing, 101, 101.0) is None

    def test_a_wait_in_vain_for_the_next_message_teaches_too(self) -> None:
        draft_timing = learned(0.002, gap=0.001)
        draft_timing.arrived(100, 100.002)
        until = wait(draft_timing, 100, 100.002)
        assert until is not None
        assert wait(draft_timing, 100, until + 0.5) is None
        draft_timing.committed(101, 101.0)
        assert wait(draft_timing, 101, 101.0) is not None  # the draft's first answers are as quick as before
        draft_timing.arrived(101, 101.002)
        assert wait(draft_timing, 101, 101.002) is None

    def test_what_is_given_up_is_not_hoped_for_again_before_the_next_commit(self) -> None:
        draft_timing = learned(0.002)
        until = wait(draft_timing, 100, 100.0)
        assert until is not None
        for later in (0.0, 0.001, 0.01):
            assert draft_timing.wait_estimate(
                100, until + later, expected=1.0, leaf=1.0, break_even=0.0, patience=9.0
            ) == WaitEstimate(1.0)

    def test_late_messages_teach_that_a_draft_is_quick_again(self) -> None:
        draft_timing = learned(0.050)
        for base in range(101, 140):  # the verifier does not wait; answers are for positions already passed
            draft_timing.committed(base, float(base))
            draft_timing.committed(base + 1000, base + 0.001)
            draft_timing.arrived(base, base + 0.002)
        draft_timing.committed(200, 200.0)
        assert wait(draft_timing, 200, 200.0) is not None

    def test_it_remembers_only_recent_commits(self) -> None:
        draft_timing = learned(0.002)
        draft_timing.arrived(5, 200.0)  # long past: ignored
        assert wait(draft_timing, 100, 100.0) is not None

    def test_a_session_that_gets_memory_anew_starts_over_where_it_was(self) -> None:
        draft_timing = learned(0.002)
        draft_timing.arrived(100, 100.002)
        draft_timing.committed(100, 500.0)  # preempted meanwhile
        assert wait(draft_timing, 100, 500.0) is None  # answers to the old commit are long overdue
        draft_timing.committed(101, 500.01)
        assert wait(draft_timing, 101, 500.01) is not None


HOPEFUL = WaitEstimate(expected=1.0, gain=300.0, until=5.002)


class TestManySessions:
    def test_nobody_hopes_for_anything(self) -> None:
        assert delay_until([WaitEstimate(1.0)], 5.0, 5.0, STEP) is None
        assert delay_until([WaitEstimate(1.0), WaitEstimate(4.0)], 5.0, 5.0, STEP) is None

    def test_one_waits_if_the_others_have_little_to_lose(self) -> None:
        assert delay_until([HOPEFUL, WaitEstimate(1.0)], 5.0, 5.0, STEP) == HOPEFUL.until
        assert delay_until([HOPEFUL] + [WaitEstimate(1.0)] * 2, 5.0, 5.0, STEP) is None

    def test_what_is_in_hand_is_not_put_off(self) -> None:
        assert delay_until([HOPEFUL, WaitEstimate(4.0)], 5.0, 5.0, STEP) is None

    def test_hopes_add_up(self) -> None:
        estimates = [HOPEFUL] * 3 + [WaitEstimate(1.0)] * 5
        assert delay_until(estimates, 5.0, 5.0, STEP) == HOPEFUL.until

    def test_the_question_is_open_again_when_the_first_hope_ends(self) -> None:
        sooner = WaitEstimate(expected=1.0, gain=1.0, until=5.001)
        assert delay_until([HOPEFUL, sooner, WaitEstimate(0.1)], 5.0, 5.0, STEP) == 5.001

    def test_time_spent_waiting_has_been_spent(self) -> None:
        """A step's gain is divided by the whole time since the last step."""
        estimates = [HOPEFUL] + [WaitEstimate(1.0)] * 4
        assert delay_until(estimates, 5.0, 5.0, STEP) is None
        assert delay_until(estimates, 5.0, 5.0 - STEP, STEP) is not None

    @given(
        st.lists(
            st.builds(
                WaitEstimate,
                expected=st.floats(1.0, 13.0),
                gain=st.one_of(st.just(0.0), st.floats(1.0, 1e4)),
                until=st.floats(5.0, 6.0, exclude_min=True),
            ),
            min_size=1,
            max_size=8,
        ),
        st.floats(0.001, 0.1),
        st.floats(0.0, 0.1),
    )
    def test_it_ends(self, estimates: list[WaitEstimate], step: float, waited: float) -> None:
        """A delay ends in the future, when one of the sessions stops waiting; more candidates never lengthen it."""
        until = delay_until(estimates, 5.0, 5.0 - waited, step)
        assert until is None or until in [p.until for p in estimates if p.gain]
        richer = [*estimates, WaitEstimate(1e9)]
        assert delay_until(richer, 5.0, 5.0 - waited, step) is None

    def test_two_timings_together(self) -> None:
        """The step waits for the quick draft's first message, but not for the slow draft after that."""
        quick, slow = learned(0.002), learned(0.050)
        estimates = [
            p.wait_estimate(100, 100.0, expected=1.0, leaf=1.0, break_even=0.0, patience=1.0) for p in (quick, slow)
        ]
        until = delay_until(estimates, 100.0, 100.0, STEP)
        assert until == pytest.approx(100.004, abs=0.002)
        quick.arrived(100, 100.002)
        estimates = [
            quick.wait_estimate(100, 100.002, expected=3.0, leaf=0.1, break_even=0.0, patience=1.0),
            slow.wait_estimate(100, 100.002, expected=1.0, leaf=1.0, break_even=0.0, patience=1.0),
        ]
        assert delay_until(estimates, 100.002, 100.0, STEP) is None


def test_a_row_must_be_worth_its_price() -> None:
    """The gain of expected candidates is net of their verification cost, and 0 where they cost more than they bring."""
    draft_timing = DraftTiming()
    draft_timing.committed(100, 100.0)

    def gain(break_even: float) -> float:
        return draft_timing.wait_estimate(100, 100.0, expected=1.0, leaf=1.0, break_even=break_even, patience=1.0).gain

    free = gain(0.0)
    assert 0 < gain(0.35) < 0.6 * free  # initial acceptance estimate: 0.7
    assert gain(0.75) == 0.0
