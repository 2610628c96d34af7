"""Admission control: decides whether a session may be opened at a possibly full verifier.

Without it, a flood would be sent to the verifier to be refused there, and refusals would be slow when they matter most.
A verifier reports its room for sessions: requests beyond it are refused without asking. While the room is unknown, one
request goes ahead as a probe; its answer waits for no step. If there is no answer, the requests behind it do not repeat
the wait one after another.

Sessions being opened count against the room, but only for tenants with openings in flight: if there is any room, a
tenant's first opening goes ahead, however many openings other tenants have. A tenant with cancelled openings waits for
the places these still hold (`cancelled_openings.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from orchestrator.pods.cancelled_openings import CancelledOpenings
from orchestrator.pods.capacity import PodCapacity
from specdec.serving.errors import GrammarPendingError, OverloadedError, TenantLimitError, TooLateError
from specdec.serving.pods.breaker import Breaker
from specdec.v2 import model_pb2

MAX_OPENINGS = 64
"""Openings in flight at a verifier. Its answers wait for no step, so more would only move the queue from here to there.
Twice as many are allowed, if each of the others is its tenant's only one."""

MAX_WAITING = 16
"""Limit on a tenant's requests waiting for places of its cancelled ones; more are refused before parsing."""

REFUSED_SECONDS = 0.05
"""Seconds for which other requests are refused after a refusal by the verifier. Every ended text makes room, so this is
short: it only keeps a flood from asking again and again."""


class LeftAloneError(Exception):
    """The verifier is not asked: other requests have just found it unresponsive."""


class Admission:
    """Admission to one verifier."""

    def __init__(self, load: PodCapacity, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._breaker = breaker
        self._changed = asyncio.Event()  # replaced whenever an opening is over
        self._openings: Counter[str] = Counter()  # openings in flight by tenant, without zeros
        self._waiting: Counter[str] = Counter()  # requests waiting for a place by tenant, without zeros
        self.cancelled = CancelledOpenings(clock)

    @asynccontextmanager
    async def opening(self, tenant: str = "", *, again: bool = False) -> AsyncIterator[None]:
        """Hold a place while a session is being opened. Raise OverloadedError if there is no room, LeftAloneError if
        waiting for room is pointless. A resumed text (`again`) does not wait: the verifier always takes it."""
        load = self._load
        load.coming += 1
        try:
            while not (again or self._go_ahead(tenant)):
                self._waiting[tenant] += 1
                try:
                    async with asyncio.timeout(self.cancelled.wait(tenant, self._openings[tenant]) or None):
                        await self._changed.wait()
                except TimeoutError:
                    pass  # the place of a cancelled opening is free
                finally:
                    self._waiting[tenant] -= 1
                    self._waiting += Counter()  # drop zeros
                if self._breaker.state == "open":
                    raise LeftAloneError("its circuit breaker is open")
            self.cancelled.opening(tenant)
            load.opening += 1
            self._openings[tenant] += 1
            try:
                yield
            except (TenantLimitError, GrammarPendingError, TooLateError):
                raise  # concerns this request only
            except OverloadedError as refusal:
                full = model_pb2.PodCapacity(sessions=load.ours, wait_us=int(1e6 * refusal.retry_after))
                load.report(full, REFUSED_SECONDS)
                raise
            finally:
                load.opening -= 1
                self._openings[tenant] -= 1
                self._openings += Counter()  # drop zeros
                self._changed.set()
                self._changed = asyncio.Event()
        finally:
            load.coming -= 1

    @contextmanager
    def session(self, tenant: str) -> Iterator[None]:
        """Count an open session while the context lasts."""
        self.cancelled.begun(tenant)
        try:
            yield
        finally:
            self.cancelled.ended(tenant)

    def refusal(self, tenant: str) -> OverloadedError | None:
        """Return the error for a new request of a tenant, if asking the verifier is pointless; else None."""
        if self._waiting[tenant] >= MAX_WAITING and (seconds := self.cancelled.wait(tenant, self._openings[tenant])):
            problem = f"{self._waiting[tenant]} of its requests wait for places of those that it has cancelled"
            return TenantLimitError(tenant, problem, seconds)
        told = self._load.reported
        if told is None or told.room > (self._load.opening if self._openings[tenant] else 0):
            return None
        return OverloadedError(f"verifier: has {told.sessions} sessions, no capacity for more", told.wait_us / 1e6)

    def _go_ahead(self, tenant: str) -> bool:
        """Return True if the verifier may be asked now, False if the caller must wait; OverloadedError if asking is
        pointless."""
        refusal = self.refusal(tenant)
        if refusal is not None:
            raise refusal
        if self.cancelled.wait(tenant, self._openings[tenant]):
            return False
        if self._load.reported is None:
            return self._load.opening < 1  # one probe at a time
        # Tenants with openings in flight stop at half the places, so that a tenant's first opening finds one.
        return self._load.opening < (MAX_OPENINGS if self._openings[tenant] else 2 * MAX_OPENINGS)
