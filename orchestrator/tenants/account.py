"""A tenant's account: its current use of its limits."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from orchestrator.tenants.file import Tenant
from specdec.serving.callers.token_bucket import TokenBucket
from specdec.serving.errors import InvalidRequestError, TenantLimitError

RETRY_SECONDS = 1.0
"""Retry-after in seconds for a tenant with too many concurrent requests, whose end cannot be predicted."""


class Account:
    """Counts a tenant's running texts, requests and tokens against its limits. A `tenant` of None means all callers
    together, without limits."""

    def __init__(self, tenant: Tenant | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.running = 0  # running texts: n samples count n times, since they cost as much as n requests
        self._clock = clock
        self._rates: dict[str, TokenBucket] = {}  # by the limit's name
        self.change(tenant)

    @property
    def tenant_class(self) -> str:
        return "default" if self.tenant is None else self.tenant.tenant_class

    def name_of(self, given: str) -> str:
        """Return the tenant's name; that of the request, `given`, if all callers share the account."""
        return given if self.tenant is None else self.tenant.name

    def change(self, tenant: Tenant | None) -> None:
        """Replace the tenant's limits. Existing token buckets keep their tokens."""
        self.tenant = tenant
        for name in ("requests_per_minute", "tokens_per_minute"):
            limit = getattr(tenant, name, None)
            if limit is None:
                self._rates.pop(name, None)
            elif name in self._rates:
                self._rates[name].change(limit / 60.0, limit)
            else:
                self._rates[name] = TokenBucket(limit / 60.0, limit, clock=self._clock)  # burst: one minute's worth

    @contextmanager
    def request(self, samples: int = 1, prompts: int = 1) -> Iterator[None]:
        """Count a request for `samples` texts while the context lasts; `prompts`: number of requests that the client
        sent as one. Raise TenantLimitError if a limit is reached now, InvalidRequestError if `samples` alone exceeds
        max_concurrent_requests, or `prompts` exceeds requests_per_minute."""
        tenant = self.tenant
        if tenant is not None:
            most = tenant.max_concurrent_requests
            if most is not None and samples > most:  # no retry helps
                problem = f"is {samples}, must be at most {most}, max_concurrent_requests of tenant {tenant.name!r}"
                raise InvalidRequestError([("n", problem)])
            if most is not None and self.running + samples > most:
                problem = f"max_concurrent_requests is {most}, {self.running} are running, n is {samples}"
                raise TenantLimitError(tenant.name, problem, RETRY_SECONDS)
            rate_limit = tenant.requests_per_minute
            if rate_limit is not None and prompts > rate_limit:
                problem = f"has {prompts} prompts, must have at most {rate_limit}, requests_per_minute of tenant"
                raise InvalidRequestError([("prompt", f"{problem} {tenant.name!r}")])
            for name, rate in self._rates.items():
                if seconds := rate.seconds_until(1):
                    raise TenantLimitError(tenant.name, f"{name} is {rate.burst:.0f}, used up", seconds)
        self._spend("requests_per_minute", 1)
        self.running += samples
        try:
            yield
        finally:
            self.running -= samples

    def spend_tokens(self, tokens: int) -> None:
        """Count tokens of a prompt or of a text, as they arrive."""
        self._spend("tokens_per_minute", tokens)

    def _spend(self, name: str, units: int) -> None:
        if (rate := self._rates.get(name)) is not None:
            rate.spend(units)
