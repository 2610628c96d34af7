"""Accounts: finds the account of each call by its API key."""

from __future__ import annotations

import asyncio
from functools import partial

from orchestrator.tenants.account import Account
from orchestrator.tenants.file import Tenant, Tenants, TenantsFile
from specdec.api_keys import bearer_key, hash_of
from specdec.serving.errors import PermissionDeniedError, UnauthenticatedError
from specdec.serving.interceptor import Metadata
from specdec.serving.periodic import Periodic
from specdec.serving.watched import Watched

HEADER = "authorization"

MAX_KEY_CHARACTERS = 512
"""Longest key in characters; longer ones are rejected without hashing."""

RELOAD_SECONDS = 1.0
"""Interval in seconds between checks of the file."""


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
