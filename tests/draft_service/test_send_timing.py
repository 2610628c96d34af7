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
    """Return a timer with commits every PERIOD, the last one at 0."""
    send_timer = SendTimer()
    for number in range(1 - commits, 1):
        send_timer.committed(number * PERIOD)
    return send_timer


def test_one_message_a_step_leaves_just_in_time() -> None:
    for round_trip in (0.0, 0.009, 0.018):
        next_send_at = steady().next_send_at(ONE_A_STEP, round_trip, STEP, urgent=False)
        assert PERIOD - round_trip - 3 * STEP < next_send_at < PERIOD - round_trip - STEP


def test_where_a_round_trip_takes_longer_than_a_step_it_is_in_time_for_a_later_one() -> None:
    send_timer = steady()
    near, far = (send_timer.next_send_at(ONE_A_STEP, trip, STEP, urgent=False) for trip in (0.01, 0.01 + 2 * PERIOD))
    assert far == pytest.approx(near)


def test_there_is_one_message_a_step() -> None:
    send_timer = steady()
    first = send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=False)
    send_timer.sent(first)
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=True) == first + ONE_A_STEP  # if no commit comes
    send_timer.committed(PERIOD, unsent=True)
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=True) == pytest.approx(first + PERIOD, abs=1e-4)


def test_where_a_step_has_several_the_first_goes_out_at_once() -> None:
    send_timer = steady()
    send_timer.sent(0.001)
    assert send_timer.next_send_at(FOUR_A_STEP, 0.0, STEP, urgent=False) == 0.001 + FOUR_A_STEP
    assert send_timer.next_send_at(FOUR_A_STEP, 0.0, STEP, urgent=True) == -math.inf


def test_the_first_messages_of_a_session_wait_for_nothing() -> None:
    send_timer = SendTimer()
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=True) == -math.inf
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf
    send_timer.committed(5.0)
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf


def test_a_moment_that_is_past_is_now() -> None:
    """The draft is too slow, or its estimate of the round trip is wrong."""
    assert steady().next_send_at(ONE_A_STEP, 0.0, PERIOD, urgent=False) == 0.0
    assert steady().next_send_at(ONE_A_STEP, 0.999 * PERIOD, STEP, urgent=False) == 0.0


def test_a_commit_that_comes_too_early_sends_what_it_found() -> None:
    send_timer = steady()
    send_timer.sent(-STEP)
    send_timer.committed(PERIOD / 3, unsent=True)
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=False) == -math.inf
    send_timer.sent(PERIOD / 3)
    assert send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=False) > PERIOD / 3


def test_the_less_even_the_steps_the_earlier_it_sends() -> None:
    """One step in eight begins without the latest candidates; without a margin for the deviation, three would."""
    random, send_timer, now, late = Random(0), SendTimer(), 0.0, 0
    for _ in range(2000):
        gap = PERIOD * random.uniform(0.5, 1.5)
        late += send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=False) > now + gap
        send_timer.sent(now + gap / 2)
        now += gap
        send_timer.committed(now)
    assert late < 2000 / 4


def test_a_long_silence_is_soon_forgotten() -> None:
    """The session had no memory for a while."""
    send_timer = steady()
    send_timer.committed(60.0)
    for number in range(1, 20):
        send_timer.sent(60.0 + number * PERIOD - STEP)
        send_timer.committed(60.0 + number * PERIOD)
    next_send_at = send_timer.next_send_at(ONE_A_STEP, 0.0, STEP, urgent=True) - (60.0 + 19 * PERIOD)
    assert PERIOD / 2 < next_send_at < PERIOD


@given(st.lists(st.tuples(seconds, st.booleans(), st.booleans()), max_size=40), seconds, seconds, seconds)
def test_nothing_waits_past_the_next_commit_twice(
    gaps: list[tuple[float, bool, bool]], interval: float, round_trip: float, step: float
) -> None:
    """For any commits: if a commit finds unsent candidates, with nothing sent since the previous one, they are sent
    at once."""
    send_timer, now = SendTimer(), 0.0
    sent = True
    for gap, sends, unsent in gaps:
        now += gap
        send_timer.committed(now, unsent=unsent)
        if unsent and not sent:
            assert send_timer.next_send_at(interval, round_trip, step, urgent=True) == -math.inf
        next_send_at = send_timer.next_send_at(interval, round_trip, step, urgent=False)
        assert not math.isnan(next_send_at)
        sent = sends
        if sends:
            send_timer.sent(now)
