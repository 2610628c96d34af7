"""Cancelled openings: what a tenant's requests cost that are cancelled as soon as they are asked.

To open a session costs a verifier some milliseconds, whatever becomes of it, and who cancels asks again at once. Limits
on what is under way do not see such requests, since they are over. So an opening that is cancelled keeps its place for
a while.
"""

from __future__ import annotations

import time
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Callable

CANCELLED_SECONDS = 1.0
"""Seconds from the beginning of an opening for which its place is taken, if the request is cancelled in that time."""

MAX_CANCELLED = 16
"""Places of a tenant that has cancelled openings, while other tenants have sessions: those that are under way or are
kept so. At some 4 ms of processor time each they are a fifteenth of a core."""

PRESENT_SECONDS = 10.0
"""Seconds for which a tenant counts as present after its last opening."""


class CancelledOpenings:
    """The places of cancelled openings at one verifier, by tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, list[float]] = {}  # when each place is free, by tenant
        self._sessions: Counter[str] = Counter()
        self._seen: OrderedDict[str, float] = OrderedDict()  # when a tenant last opened a session, the latest last

    def opening(self, tenant: str) -> None:
        """Note that a tenant opens a session."""
        now = self._clock()
        self._seen[tenant] = now
        self._seen.move_to_end(tenant)
        while (first := next(iter(self._seen))) != tenant and self._seen[first] < now - PRESENT_SECONDS:
            del self._seen[first]

    def add(self, tenant: str, since: float) -> None:
        """Note that a request was cancelled whose opening began at that time."""
        free = since + CANCELLED_SECONDS
        if free > (now := self._clock()):
            insort(self._kept.setdefault(tenant, []), free)  # requests are not cancelled in the order of their openings
            for other in [other for other, kept in self._kept.items() if kept[-1] <= now]:
                del self._kept[other]

    def begun(self, tenant: str) -> None:
        self._sessions[tenant] += 1

    def ended(self, tenant: str) -> None:
        self._sessions[tenant] -= 1
        if not self._sessions[tenant]:
            del self._sessions[tenant]

    def wait(self, tenant: str, openings: int) -> float:
        """Return the seconds until a tenant with so many openings under way has a place; 0: it has one."""
        kept, now = self._kept.get(tenant), self._clock()
        if kept:
            del kept[: bisect_right(kept, now)]
        if not kept:
            self._kept.pop(tenant, None)
            return 0.0
        if openings + len(kept) < MAX_CANCELLED or not self._others(tenant, now):
            return 0.0
        return max(0.001, kept[min(len(kept) - 1, openings + len(kept) - MAX_CANCELLED)] - now)

    def _others(self, tenant: str, now: float) -> bool:
        """Return whether other tenants are present."""
        return any(each != tenant for each in self._sessions) or any(
            each != tenant and at >= now - PRESENT_SECONDS for each, at in self._seen.items()
        )
