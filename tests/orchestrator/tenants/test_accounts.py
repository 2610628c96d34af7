"""A tenant may use its limits in full, and nothing beyond them."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack

import pytest

from orchestrator.tenants.accounts import Account
from orchestrator.tenants.file import Tenant
from specdec.serving.errors import InvalidRequestError, TenantLimitError
from specdec.wire.request_metadata import PROMPTS, prompts_in


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


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
        with pytest.raises(TenantLimitError, match="max_concurrent_requests is 4, 3 are running, n is 2"):
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
        account.spend_tokens(90)  # a text is not cut off by the budget
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


def test_more_prompts_than_a_minute_allows_are_refused_at_no_cost() -> None:
    """No retry helps, and each would use up the minute's budget."""
    account = Account(Tenant("acme", requests_per_minute=6))
    with pytest.raises(InvalidRequestError, match="prompt: has 7 prompts, must have at most 6, requests_per_minute of"):
        account.request(prompts=7).__enter__()
    for _ in range(6):
        with account.request(prompts=6):
            pass
    with pytest.raises(TenantLimitError):
        account.request().__enter__()


@pytest.mark.parametrize(("given", "prompts"), [("7", 7), ("-1", 1), ("seven", 1), ("1" * 9, 1), (b"7", 1)])
def test_the_number_of_prompts_may_be_anything_a_caller_sends(given: str | bytes, prompts: int) -> None:
    assert prompts_in([(PROMPTS, given)]) == prompts
