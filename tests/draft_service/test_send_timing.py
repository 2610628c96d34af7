"""Send timing: just in time with one message per step, and robust to estimation errors."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.send_timing import SendTimer

PERIOD = 0.030
STEP = 0.002
ONE_A_STEP, FOUR_A_STEP = PERIOD, PERIOD / 4

seconds = st.floats(0.0, 10.0)


def steady(commits: int = 60) -> SendTimer:
    """Return a timer with a commit every PERIOD, the last one at 0, and its last message one PERIOD earlier."""
    send_timer = SendTimer()
    for number in range(1 - commits, 1):
        send_timer.committed(number * PERIOD)
    send_timer.sent(-PERIOD)
    return send_timer


def test_one_message_a_step_leaves_just_in_time() -> None:
    for round_trip in (0.0, 0.009, 0.018):
        due = steady().next_send_at(0.0, ONE_A_STEP, round_trip, STEP, urgent=False)
        assert PERIOD - round_trip - 2 * STEP < due < PERIOD - round_trip - STEP


def test_where_a_round_trip_takes_longer_than_a_step_it_is_in_time_for_a_later_one() -> None:
    timer = steady()
    near, far = (timer.next_send_at(0.0, ONE_A_STEP, trip, STEP, urgent=False) for trip in (0.01, 0.01 + 2 * PERIOD))
    assert far == pytest.approx(near)


def test_what_misses_a_deadline_is_in_time_for_the_next() -> None:
    timer, round_trip = steady(), PERIOD - STEP / 4
    due = timer.next_send_at(0.0, ONE_A_STEP, round_trip, STEP, urgent=False)
    assert due <= 0.0  # another draft step would end after the deadline
    timer.sent(0.0)
    due = timer.next_send_at(STEP, ONE_A_STEP, round_trip, STEP, urgent=False)
    assert PERIOD - STEP < due < PERIOD


def test_there_is_one_message_a_step() -> None:
    timer = steady()
    first = timer.next_send_at(0.0, ONE_A_STEP, 0.0, STEP, urgent=False)
    timer.sent(first)
    assert timer.next_send_at(first, ONE_A_STEP, 0.0, STEP, urgent=False) >= first + STEP
    timer.committed(PERIOD, unsent=True)
    due = timer.next_send_at(PERIOD, ONE_A_STEP, 0.0, STEP, urgent=True)
    assert due == pytest.approx(first + PERIOD, abs=1e-4)


def test_several_messages_a_step_leave_an_interval_apart_and_the_last_just_in_time() -> None:
    timer = steady()
    timer.sent(0.001)
    assert timer.next_send_at(0.002, FOUR_A_STEP, 0.0, STEP, urgent=False) == 0.001 + FOUR_A_STEP
    assert timer.next_send_at(0.002, FOUR_A_STEP, 0.0, STEP, urgent=True) == -math.inf
    timer.sent(0.6 * PERIOD)  # a message an interval later would leave no time for another
    due = timer.next_send_at(0.6 * PERIOD, FOUR_A_STEP, 0.0, STEP, urgent=False)
    assert PERIOD - 2 * STEP < due < PERIOD - STEP


def test_the_first_messages_of_a_session_wait_for_nothing() -> None:
    send_timer = SendTimer()
    assert send_timer.next_send_at(4.0, ONE_A_STEP, 0.0, STEP, urgent=True) == -math.inf
    assert send_timer.next_send_at(4.0, ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf
    send_timer.committed(5.0)
    assert send_timer.next_send_at(5.0, ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf


def test_a_draft_step_as_long_as_a_period_sends_at_once() -> None:
    assert steady().next_send_at(STEP, ONE_A_STEP, 0.0, PERIOD, urgent=False) <= STEP


def test_a_commit_that_comes_too_early_sends_what_it_found() -> None:
    send_timer = steady()
    send_timer.sent(-STEP)
    send_timer.committed(PERIOD / 3, unsent=True)
    assert send_timer.next_send_at(PERIOD / 3, ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf
    send_timer.sent(PERIOD / 3)
    assert send_timer.next_send_at(PERIOD / 3, ONE_A_STEP, 0.0, STEP, urgent=False) > PERIOD / 3


def test_the_less_even_the_steps_the_earlier_it_sends() -> None:
    """Periods vary by half. Without a margin for the deviation, every other step would begin without a message."""
    random, timer, now, late = Random(0), SendTimer(), 0.0, 0
    for _ in range(2000):
        end = now + PERIOD * random.uniform(0.5, 1.5)
        due = max(now, timer.next_send_at(now, ONE_A_STEP, 0.0, STEP, urgent=False))
        if due < end:
            timer.sent(due)
        else:
            late += 1
        timer.committed(end, unsent=due >= end)
        now = end
    assert late < 2000 / 4


def test_a_long_silence_is_soon_forgotten() -> None:
    """The session had no memory for a while."""
    send_timer = steady()
    send_timer.committed(60.0)
    for number in range(1, 20):
        send_timer.sent(60.0 + number * PERIOD - STEP)
        send_timer.committed(60.0 + number * PERIOD)
    next_send_at = send_timer.next_send_at(60.0 + 19 * PERIOD, ONE_A_STEP, 0.0, STEP, urgent=True) - (
        60.0 + 19 * PERIOD
    )
    assert PERIOD / 2 < next_send_at < PERIOD


@given(st.lists(st.tuples(seconds, st.booleans(), st.booleans()), max_size=40), seconds, seconds, seconds)
def test_nothing_waits_past_the_next_commit_twice(
    gaps: list[tuple[float, bool, bool]], interval: float, round_trip: float, step: float
) -> None:
    """For any commits: if a commit finds unsent candidates, and nothing was sent since the previous commit, they are
    sent immediately."""
    send_timer, now = SendTimer(), 0.0
    sent = True
    for gap, sends, unsent in gaps:
        now += gap
        send_timer.committed(now, unsent=unsent)
        if unsent and not sent:
            assert send_timer.next_send_at(now, interval, round_trip, step, urgent=True) == -math.inf
        next_send_at = send_timer.next_send_at(now, interval, round_trip, step, urgent=False)
        assert not math.isnan(next_send_at)
        sent = sends
        if sends:
            send_timer.sent(now)


def test_a_deadline_that_passed_without_a_message_is_made_up_for() -> None:
    timer = steady()
    late = PERIOD + STEP
    assert timer.next_send_at(late, ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf


@pytest.mark.parametrize(("interval", "most"), [(0.9, 1.2), (0.5, 2.2), (0.25, 4.2)])
def test_messages_keep_to_the_interval_and_are_fresh_when_a_step_begins(interval: float, most: float) -> None:
    """The draft's steps take about a quarter of a period, and it always has something unsent. `interval` is in periods,
    `most` in messages per period."""
    random, timer, now, ages = Random(1), SendTimer(), 0.0, list[float]()
    sent, commit = [0.0], PERIOD
    for _ in range(2000):
        now += 0.25 * PERIOD * random.uniform(0.8, 1.2)
        if now >= commit:
            ages.append(commit - sent[-1])
            timer.committed(commit)
            commit += PERIOD * random.uniform(0.97, 1.03)
        if timer.next_send_at(now, interval * PERIOD, 0.0, 0.25 * PERIOD, urgent=False) <= now:
            timer.sent(now)
            sent.append(now)
    assert len(sent) / len(ages) <= most
    settled = ages[50:]
    assert sum(settled) / len(settled) < 0.35 * PERIOD


def test_a_burst_of_commits_makes_no_flood() -> None:
    """After a stall, queued commits come together; the pace of steps is unknown from then on."""
    timer, sent = SendTimer(), 0
    for number in range(10):
        timer.committed(1.0 + number * 1e-6)
    for number in range(30):
        for part in range(15):
            now = 1.0 + (number + part / 15) * PERIOD
            if timer.next_send_at(now, 0.9 * PERIOD, 0.0, STEP, urgent=False) <= now:
                timer.sent(now)
                sent += 1
        timer.committed(1.0 + (number + 1) * PERIOD)
    assert sent <= 45
