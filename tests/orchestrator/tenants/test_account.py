"""A tenant gets what its limits say, and no more."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tenants.account import Account
from orchestrator.tenants.file import Tenant
from orchestrator.tenants.rate import Rate
from specdec.serving.errors import InvalidRequestError, TenantLimitError


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


spends = st.lists(st.tuples(st.floats(0, 30), st.integers(1, 200)), max_size=40)


@given(st.integers(1, 1000), spends)
def test_a_rate_lets_a_minutes_worth_through_at_once(per_minute: int, asked: list[tuple[float, int]]) -> None:
    """And what time brings besides: no more was spent before anything that is let through."""
    clock = Clock()
    rate = Rate(per_minute, clock)
    begin, spent = clock.now, 0
    for pause, units in asked:
        clock.now += pause
        if rate.seconds_until(1) == 0:
            assert spent <= per_minute * (1 + (clock.now - begin) / 60) + 1e-6
            rate.spend(units)
            spent += units


@given(st.integers(1, 1000), st.integers(1, 5000))
def test_who_waits_as_long_as_told_is_let_through(per_minute: int, units: int) -> None:
    clock = Clock()
    rate = Rate(per_minute, clock)
    rate.spend(units)
    if seconds := rate.seconds_until(1):
        clock.now += seconds * 0.99
        assert rate.seconds_until(1) > 0
        clock.now += seconds * 0.01 + 1e-6
    assert rate.seconds_until(1) == pytest.approx(0, abs=1e-6)


def test_requests_at_the_same_time() -> None:
    account = Account(Tenant("acme", max_concurrent_requests=2))
    with ExitStack() as running:
        running.enter_context(account.request())
        with account.request():
            with pytest.raises(TenantLimitError, match="'acme': max_concurrent_requests is 2") as refused:
                running.enter_context(account.request())
            assert refused.value.retry_after == 1
        running.enter_context(account.request())
    assert account.running == 0


def test_each_sample_of_a_request_counts() -> None:
    account = Account(Tenant("acme", max_concurrent_requests=4))
    with account.request(3):
        with pytest.raises(TenantLimitError, match="max_concurrent_requests is 4, 3 are under way, n is 2"):
            account.request(2).__enter__()
        with account.request():
            assert account.running == 4
    assert account.running == 0


def test_more_samples_than_a_tenant_may_have_are_refused_for_good() -> None:
    account = Account(Tenant("acme", max_concurrent_requests=4))
    with pytest.raises(InvalidRequestError, match="n: is 5, must be at most 4, max_concurrent_requests of tenant"):
        account.request(5).__enter__()
    assert account.running == 0


def test_requests_a_minute() -> None:
    clock = Clock()
    account = Account(Tenant("acme", requests_per_minute=3), clock)
    for _ in range(3):
        with account.request():
            pass
    with pytest.raises(TenantLimitError, match="requests_per_minute is 3") as refused, account.request():
        pass
    assert refused.value.retry_after == pytest.approx(20)
    clock.now += 20.001
    with account.request():
        pass


def test_tokens_a_minute_may_leave_a_debt() -> None:
    clock = Clock()
    account = Account(Tenant("acme", tokens_per_minute=60), clock)
    with account.request():
        account.spend_tokens(90)  # a text is not cut off for its length
    with pytest.raises(TenantLimitError, match="tokens_per_minute is 60") as refused, account.request():
        pass
    assert refused.value.retry_after == pytest.approx(31)


def test_other_limits_hold_at_once_and_what_was_used_counts() -> None:
    clock = Clock()
    tenant = Tenant("acme", tokens_per_minute=100)
    account = Account(tenant, clock)
    account.spend_tokens(95)
    account.change(dataclasses.replace(tenant, tokens_per_minute=10))
    with account.request():
        account.spend_tokens(6)
    with pytest.raises(TenantLimitError, match="tokens_per_minute is 10"), account.request():
        pass
    account.change(dataclasses.replace(tenant, tokens_per_minute=None))
    with account.request():
        account.spend_tokens(10**9)


def test_anybody_has_no_limits() -> None:
    account = Account(None)
    with ExitStack() as running:
        for _ in range(1000):
            running.enter_context(account.request())
            account.spend_tokens(1000)
