"""Cancelled openings: limits tenants whose requests are cancelled right after they are sent.

Opening a session costs a verifier some milliseconds even if the client cancels, and the client can retry at once.
Limits on concurrency miss such requests, since they are over. So a cancelled opening keeps its place for a while.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable

CANCELLED_SECONDS = 1.0
"""Seconds from the start of an opening for which its place stays taken, if the request is cancelled within that
time."""

MAX_CANCELLED = 16
"""Places of a tenant with cancelled openings, in flight or kept, while other tenants have sessions. At some 4 ms of
processor time each, 16 a second cost a fifteenth of a core."""

PRESENT_SECONDS = 10.0
"""Seconds after its last opening for which a tenant counts as present."""


class CancelledOpenings:
    """The places of cancelled openings at one verifier, by tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, list[float]] = {}  # by tenant: when each place becomes free, sorted
        self._sessions: Counter[str] = Counter()
        self._seen: OrderedDict[str, float] = OrderedDict()  # a tenant's last opening, latest last

    def opening(self, tenant: str) -> None:
        """Note that a tenant opens a session."""
        now = self._clock()
        self._seen[tenant] = now
        self._seen.move_to_end(tenant)
        while (first := next(iter(self._seen))) != tenant and self._seen[first] < now - PRESENT_SECONDS:
            del self._seen[first]

    def add(self, tenant: str, since: float) -> None:
        """Note a cancelled request; its opening began at `since`."""
        free = since + CANCELLED_SECONDS
        if free > (now := self._clock()):
            insort(self._kept.setdefault(tenant, []), free)  # cancellations come in another order than openings
            for other in [other for other, kept in self._kept.items() if kept[-1] <= now]:
                del self._kept[other]

    def begun(self, tenant: str) -> None:
        self._sessions[tenant] += 1

    def ended(self, tenant: str) -> None:
        self._sessions[tenant] -= 1
        if not self._sessions[tenant]:
            del self._sessions[tenant]

    def wait(self, tenant: str, openings: int) -> float:
        """Return the seconds until a tenant with this number of openings in flight has a place; 0: it has one."""
        kept, now = self._kept.get(tenant), self._clock()
        if kept:
            del kept[: bisect_right(kept, now)]
        if not kept:
            self._kept.pop(tenant, None)
            return 0.0
        if openings + len(kept) < MAX_CANCELLED or not self._others(tenant, now):
            return 0.0
        # `kept` is sorted: once the place at this index is free, openings and kept places are below MAX_CANCELLED. If
        # openings alone exceed it, even the last place is not enough, and the caller has to ask again.
        return max(0.001, kept[min(len(kept) - 1, openings + len(kept) - MAX_CANCELLED)] - now)

    def _others(self, tenant: str, now: float) -> bool:
        """Return True if other tenants are present."""
        return any(other != tenant for other in self._sessions) or any(
            other != tenant and at >= now - PRESENT_SECONDS for other, at in self._seen.items()
        )
