"""No more calls pass than the rate allows, and a caller that waits for the returned delay passes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.serving.callers.token_bucket import TokenBucket, TokenBuckets


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(burst=st.integers(1, 1000), spends=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200)), max_size=40))
def test_a_burst_passes_at_once_and_the_rate_after_it(burst: int, spends: list[tuple[float, int]]) -> None:
    """A call passes if the bucket is not in debt before it; it may leave a debt."""
    clock = Clock()
    bucket = TokenBucket(burst / 60, burst, clock=clock)
    begin, spent = clock.now, 0
    for pause, tokens in spends:
        clock.now += pause
        if bucket.seconds_until() == 0:
            assert spent <= burst * (1 + (clock.now - begin) / 60) + 1e-6
            bucket.spend(tokens)
            spent += tokens


@given(burst=st.integers(1, 1000), tokens=st.integers(1, 5000))
def test_a_caller_that_waits_as_long_as_told_is_let_through(burst: int, tokens: int) -> None:
    clock = Clock()
    bucket = TokenBucket(burst / 60, burst, clock=clock)
    bucket.spend(tokens)
    if seconds := bucket.seconds_until():
        clock.now += seconds * 0.99
        assert bucket.seconds_until() > 0
        clock.now += seconds * 0.01 + 1e-6
    assert bucket.seconds_until() == pytest.approx(0, abs=1e-6)


def test_a_debt_is_bounded() -> None:
    clock = Clock()
    bucket = TokenBucket(1.0, 2.0, max_debt=3.0, clock=clock)
    assert [bucket.spend() for _ in range(9)] == [True] * 2 + [False] * 7
    assert bucket.seconds_until() == 4.0


def test_each_key_has_a_bucket_and_the_oldest_is_forgotten() -> None:
    clock = Clock()
    buckets = TokenBuckets(2.0, 3.0, max_keys=2, clock=clock)
    assert [buckets.wait("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.wait("b") == 0.0
    clock.now += 1.0
    assert [buckets.wait("a") for _ in range(3)] == [0.0, 0.0, 0.5]
    assert buckets.wait("c") == 0.0
    assert len(buckets) == 2
    assert [buckets.wait("b") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
