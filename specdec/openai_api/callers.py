"""Callers: identifies them before a body is read, and limits their requests.

Only orchestrators know the keys. Their verdict on a key is cached for a while, so that a request with a wrong key costs
no call and no resource that tenants share. A request that calls an orchestrator does not wait for a renewed verdict:
the orchestrator refuses a revoked key itself.
"""

from __future__ import annotations

import asyncio
import hashlib
import ipaddress
import random
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from starlette.types import Scope

from specdec.openai_api.bodies import EVICTABLE
from specdec.openai_api.errors import ApiError, too_many
from specdec.serving.callers.token_bucket import TokenBuckets

ACCEPTED_SECONDS = 60.0
"""Lifetime in seconds of two verdicts: that a key is accepted, and whether keys are required. A request that calls an
orchestrator uses the old verdict until the new one arrives."""

REFUSED_SECONDS = 5.0
"""Lifetime in seconds of a refusal; short, since the key's tenant may be new."""

MAX_ACCEPTED = 16384
MAX_REFUSED = 4096
"""Maximum cached verdicts of each kind, keyed by the key's hash; the oldest are evicted."""

CHECK_SECONDS = 15.0
"""Timeout of a check in seconds: longer than the client waits for a restarting orchestrator."""

UNKNOWN_RATE, UNKNOWN_BURST = 5.0, 20.0
"""Rate and burst of refused unknown keys allowed per network. Each costs a call."""

MAX_CHECKS = 64
"""Maximum number of concurrent key checks."""

ALL_UNKNOWN_RATE, ALL_UNKNOWN_BURST = 50.0, 100.0
"""Rate and burst of refused unknown keys in total."""

REFUSAL_RATE, REFUSAL_BURST = 20.0, 50.0
"""Rate and burst of refusals per network that are answered without delay."""

DELAY_SECONDS = 1.0
MAX_DELAYED = 256
"""Delay of further refusals: half to all of this, in seconds; and the maximum number of delayed ones."""

REQUEST_RATE, REQUEST_BURST = 500.0, 1024.0
"""Rate and burst of one caller's requests: half of the capacity of this process."""

CANCEL_SUFFIX = "/cancel"
"""Suffix of the only admitted POST that calls no orchestrator."""

MAX_NETWORKS = 4096
"""Maximum networks, and maximum callers, whose rates are tracked."""

Check = Callable[[str], Awaitable[object]]
"""Asks an orchestrator about a value of the `authorization` header, "" for none; raises an ApiError on refusal."""


def network_of(host: str) -> str:
    """Return the network for rate limits: an IPv4 address, or the /64 of an IPv6 address, usually one site."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:  # such as a Unix socket's
        return host
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is None:
        return str(ipaddress.IPv6Network((address, 64), strict=False))
    return host


class Keys:
    """The orchestrators' cached verdicts on keys."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._accepted: OrderedDict[bytes, float] = OrderedDict()  # expiry by key hash
        self._refused: OrderedDict[bytes, tuple[ApiError, float]] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[ApiError | None]] = {}  # in flight
        self._unknown = TokenBuckets(UNKNOWN_RATE, UNKNOWN_BURST, MAX_NETWORKS)
        self._all_unknown = TokenBuckets(ALL_UNKNOWN_RATE, ALL_UNKNOWN_BURST, 1)

    async def refusal(self, authorization: str, network: str, *, calls: bool = True) -> ApiError | None:
        """Return the orchestrators' refusal of a key; None if they accept it. ApiError if it cannot be checked now.
        `calls`: the request will call an orchestrator, so an expired verdict that lasted `ACCEPTED_SECONDS` is used
        while it is renewed."""
        key, now = hashlib.sha256(authorization.encode()).digest(), time.monotonic()
        accepted = self._accepted.get(key)
        error, until = (None, accepted) if accepted is not None else self._refused.get(key, (None, 0.0))
        if now < until:
            return error
        if key not in self._checks:
            if authorization and key not in self._accepted:  # known keys are bounded by the number of tenants
                if wait := self._unknown.of(network).seconds_until():
                    raise too_many("too many unknown API keys from your network", wait)
                if len(self._checks) >= MAX_CHECKS or (wait := self._all_unknown.of("").seconds_until()):
                    raise too_many("too many API keys are waiting to be checked", wait or 1.0)
            self._checks[key] = check = asyncio.create_task(self._ask(key, authorization, network))
            check.add_done_callback(_seen)
        if calls and (accepted is not None or (error is not None and not authorization)):
            return error
        # Cancelling a request does not cancel the check: other requests may wait for it.
        return await asyncio.shield(self._checks[key])

    def drop(self, authorization: str) -> None:
        """Forget that a key was accepted: an orchestrator has refused it since then."""
        self._accepted.pop(hashlib.sha256(authorization.encode()).digest(), None)

    async def _ask(self, key: bytes, authorization: str, network: str) -> ApiError | None:
        try:
            async with asyncio.timeout(CHECK_SECONDS):
                await self._check(authorization)
        except TimeoutError:
            message = f"no orchestrator has checked the API key within {CHECK_SECONDS:g} s"
            raise ApiError(503, message, "service_unavailable_error", code="unavailable", retry_after=1) from None
        except ApiError as error:
            if error.status != 401:
                raise
            self._accepted.pop(key, None)
            if authorization:  # charge refused keys only: after a start, the tenants' valid keys are unknown, too
                self._unknown.of(network).spend()
                self._all_unknown.of("").spend()
            seconds = REFUSED_SECONDS if authorization else ACCEPTED_SECONDS
            self._refused[key] = error, time.monotonic() + seconds
            self._refused.move_to_end(key)
            if len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
            return error
        finally:
            del self._checks[key]
        self._refused.pop(key, None)
        self._accepted[key] = time.monotonic() + ACCEPTED_SECONDS
        self._accepted.move_to_end(key)
        if len(self._accepted) > MAX_ACCEPTED:
            self._accepted.popitem(last=False)
        return None


def _seen(check: asyncio.Task[ApiError | None]) -> None:
    """Mark a check's outcome as retrieved: the requests that waited for it may be gone."""
    if not check.cancelled():
        check.exception()


class Callers:
    """Admits requests by their headers. A caller is identified by its API key, or by its network if keys are not
    required."""

    def __init__(self, check: Check, most_requests: int) -> None:
        """`most_requests` limits the requests in progress; one caller gets at most half of them."""
        self._keys = Keys(check)
        self._most = most_requests
        self._running: Counter[str] = Counter()  # requests by caller
        self._rates = TokenBuckets(REQUEST_RATE, REQUEST_BURST, MAX_NETWORKS)
        self._refusals = TokenBuckets(REFUSAL_RATE, REFUSAL_BURST, MAX_NETWORKS)
        self._delayed = 0  # requests

    @asynccontextmanager
    async def admitted(self, scope: Scope, authorization: str, network: str) -> AsyncIterator[str]:
        """Admit a request for the duration of the context and yield its caller; ApiError if it is not admitted."""
        caller = await self._identify(scope, authorization, network)
        if wait := self._rates.wait(caller):
            raise too_many(f"the rate limit is {REQUEST_RATE:g} requests per second", wait)
        own, total = self._running[caller], self._running.total()
        if own and own >= self._most - total:  # dynamic threshold, as in `Bodies.reserve`
            raise too_many(f"the limit on concurrent requests is reached: {own} of yours are in progress")
        self._running[caller] += 1
        try:
            yield caller
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]

    def refused(self, authorization: str) -> None:
        """Record that an orchestrator has refused an admitted caller's key."""
        self._keys.drop(authorization)

    async def _identify(self, scope: Scope, authorization: str, network: str) -> str:
        """Return the caller of a request; ApiError if its key is refused."""
        if await self._keys.refusal("", network) is None:
            return network
        calls = scope["method"] == "POST" and not scope["path"].endswith(CANCEL_SUFFIX)
        refusal = await self._keys.refusal(authorization, network, calls=calls)
        if refusal is None:
            return hashlib.sha256(authorization.encode()).hexdigest()
        await self._delay(scope, network)
        raise replace(refusal)  # a copy: the cached one must collect no tracebacks

    async def _delay(self, scope: Scope, network: str) -> None:
        """Delay the answer to a network with many refusals; meanwhile the connection may be evicted."""
        if self._refusals.wait(network) and self._delayed < MAX_DELAYED:
            scope[EVICTABLE] = True
            self._delayed += 1
            try:
                # Jitter: delayed callers must not return together.
                await asyncio.sleep(DELAY_SECONDS * random.uniform(0.5, 1.0))
            finally:
                self._delayed -= 1
