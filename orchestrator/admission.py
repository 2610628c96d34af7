"""Admission control: decides whether a session may be opened at a verifier that may be full.

In a flood, every request would otherwise be sent to the verifier to be refused there, and refusals would be slow when
they matter most. A verifier reports how many more sessions it takes: beyond that number, requests are refused without
asking it. While the number is unknown, one request goes ahead and finds out; its answer waits for no step. If there is
no answer, the requests behind it need not find that out one after another.

Sessions that are being opened count against that number, but only for tenants that open some: where there is room at
all, the first one of a tenant asks for it, however many another tenant opens. A tenant that cancels what it opens waits
for places that its cancelled openings still have (`cancelled_openings.py`).
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from orchestrator.cancelled_openings import CancelledOpenings
from orchestrator.pod_capacity import PodCapacity
from specdec.serving.errors import GrammarPendingError, OverloadedError, TenantLimitError, TooLateError
from specdec.serving.pods.breaker import Breaker
from specdec.v2 import model_pb2

MAX_OPENINGS = 64
"""Sessions that may be in the course of being opened at a verifier: its answers wait for no step, so that more at once
would only queue there instead of here. Twice as many may, if the others are the only ones of their tenants."""

MAX_WAITING = 16
"""Requests of a tenant that may wait for places of those that it has cancelled; more are refused before anything of
them is parsed."""

REFUSED_SECONDS = 0.05
"""Seconds in which other requests are refused as well after the verifier has refused one. Every text that ends makes
room, so this is short: it only keeps a flood from asking again and again."""


class LeftAloneError(Exception):
    """The verifier is not asked: other requests have just found that it does not answer."""


class Admission:
    """Admission to one verifier."""

    def __init__(self, load: PodCapacity, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._breaker = breaker
        self._changed = asyncio.Event()  # an opening is over
        self._openings: Counter[str] = Counter()  # of each tenant that has some
        self._waiting: Counter[str] = Counter()  # likewise, for a place
        self.cancelled = CancelledOpenings(clock)

    @asynccontextmanager
    async def opening(self, tenant: str = "", *, again: bool = False) -> AsyncIterator[None]:
        """Wrap the opening of a session. Raise OverloadedError if there is no room, LeftAloneError if waiting for room
        is of no use. A text that is resumed (`again`) does not wait: the verifier takes it in any case."""
        load = self._load
        load.coming += 1
        try:
            while not (again or self._go_ahead(tenant)):
                self._waiting[tenant] += 1
                try:
                    async with asyncio.timeout(self.cancelled.wait(tenant, self._openings[tenant]) or None):
                        await self._changed.wait()
                except TimeoutError:
                    pass  # a place of a cancelled opening is free
                finally:
                    self._waiting[tenant] -= 1
                    self._waiting += Counter()
                if self._breaker.state == "open":
                    raise LeftAloneError("its circuit breaker is open")
            self.cancelled.opening(tenant)
            load.opening += 1
            self._openings[tenant] += 1
            try:
                yield
            except (TenantLimitError, GrammarPendingError, TooLateError):
                raise  # others need not be refused
            except OverloadedError as refusal:
                full = model_pb2.PodCapacity(sessions=load.ours, wait_us=int(1e6 * refusal.retry_after))
                load.report(full, REFUSED_SECONDS)
                raise
            finally:
                load.opening -= 1
                self._openings[tenant] -= 1
                self._openings += Counter()  # without tenants that have none
                self._changed.set()
                self._changed = asyncio.Event()
        finally:
            load.coming -= 1

    @contextmanager
    def session(self, tenant: str) -> Iterator[None]:
        """Wrap a session that is open."""
        self.cancelled.begun(tenant)
        try:
            yield
        finally:
            self.cancelled.ended(tenant)

    def refusal(self, tenant: str) -> OverloadedError | None:
        """Return the error for a request of a tenant that comes now, if asking the verifier is of no use; else None."""
        if self._waiting[tenant] >= MAX_WAITING and (seconds := self.cancelled.wait(tenant, self._openings[tenant])):
            problem = f"{self._waiting[tenant]} of its requests wait for places of those that it has cancelled"
            return TenantLimitError(tenant, problem, seconds)
        told = self._load.reported
        if told is None or told.room > (self._load.opening if self._openings[tenant] else 0):
            return None
        return OverloadedError(f"verifier: has {told.sessions} sessions, no room for more", told.wait_us / 1e6)

    def _go_ahead(self, tenant: str) -> bool:
        """Return True if the verifier may be asked now, False if the caller must wait; OverloadedError if asking is of
        no use."""
        refusal = self.refusal(tenant)
        if refusal is not None:
            raise refusal
        if self.cancelled.wait(tenant, self._openings[tenant]):
            return False
        if self._load.reported is None:
            return self._load.opening < 1
        return self._load.opening < (MAX_OPENINGS if self._openings[tenant] else 2 * MAX_OPENINGS)
