"""The tenants' accounts: the use of each tenant's limits, and the account of a call by its API key."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from orchestrator.tenants.file import Tenant, Tenants, TenantsFile
from specdec.api_keys import bearer_key, hash_of
from specdec.serving.callers.token_bucket import TokenBucket
from specdec.serving.errors import InvalidRequestError, PermissionDeniedError, TenantLimitError, UnauthenticatedError
from specdec.serving.interceptor import Metadata
from specdec.serving.periodic import Periodic
from specdec.serving.watched import Watched

HEADER = "authorization"

MAX_KEY_CHARACTERS = 512
"""Longest key in characters; longer ones are rejected without hashing."""

RELOAD_SECONDS = 1.0
"""Interval in seconds between checks of the file."""

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


class Accounts:
    """The accounts of all tenants in the current file; without a file, one account for all callers."""

    def __init__(self, file: TenantsFile | None = None) -> None:
        """Read the file; TenantsFileError if it cannot be used."""
        self._shared_account = Account(None)
        self._watched: Watched[Tenants] | None = None if file is None else Watched(file)
        self._by_hash: dict[str, Account] = {}
        self._by_name: dict[str, Account] = {}
        self._reloading: Periodic | None = None
        if self._watched is not None:
            self._take(self._watched.contents)

    async def start(self) -> None:
        if self._watched is not None:
            self._reloading = Periodic(partial(self._reload, self._watched), RELOAD_SECONDS, "tenants_not_taken")
            self._reloading.start()

    async def close(self) -> None:
        if self._reloading is not None:
            await self._reloading.close()

    def of(self, metadata: Metadata) -> Account:
        """Return the account of a call by its metadata; UnauthenticatedError if its key is missing or unknown."""
        if self._watched is None:
            return self._shared_account
        given = [value for key, value in metadata if key == HEADER]
        if not given:
            raise UnauthenticatedError("authorization: is missing, must be `Bearer` and an API key")
        key = bearer_key(given[0]) if len(given) == 1 and isinstance(given[0], str) else None
        if key is None:
            raise UnauthenticatedError("authorization: must be given once, as `Bearer` and an API key")
        account = self._by_hash.get(hash_of(key)) if len(key) <= MAX_KEY_CHARACTERS else None
        if account is None:
            raise UnauthenticatedError("authorization: unknown API key")
        return account

    def check_operator(self, metadata: Metadata) -> None:
        """Raise PermissionDeniedError unless the caller is an operator: the call concerns all tenants."""
        tenant = self.of(metadata).tenant
        if tenant is not None and not tenant.operator:
            raise PermissionDeniedError(
                f"tenant {tenant.name!r} is not an operator (`operator: true` in the tenants file)", "NOT_OPERATOR"
            )

    async def _reload(self, watched: Watched[Tenants]) -> None:
        if await asyncio.to_thread(watched.changed):
            self._take(watched.contents)

    def _take(self, tenants: Tenants) -> None:
        """Replace the tenants. Remaining tenants keep their accounts; running requests of removed tenants continue."""
        named: dict[str, Tenant] = {tenant.name: tenant for tenant in tenants.values()}
        self._by_name = {name: self._by_name.get(name) or Account(tenant) for name, tenant in named.items()}
        for name, account in self._by_name.items():
            account.change(named[name])
        self._by_hash = {key: self._by_name[tenant.name] for key, tenant in tenants.items()}
