"""Admission control: how full a pod is, and whether a session may be opened at a possibly full verifier.

Without it, a flood would be sent to the verifier to be refused there, and refusals would be slow when they matter most.
A verifier reports its room for sessions; requests beyond it are refused here. While the room is unknown, one request
goes ahead as a probe, whose answer does not wait for a step. If the probe opens the circuit breaker, the requests
behind it turn to other verifiers (`LeftAloneError`) instead of repeating its wait.

Sessions being opened count against the room, but only for tenants with openings in flight: if there is any room, a
tenant's first opening goes ahead, however many openings other tenants have. A tenant with cancelled openings waits for
the places that these openings still hold (`CancelledOpenings`).
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from specdec.serving.errors import GrammarPendingError, OverloadedError, TenantLimitError, TooLateError
from specdec.serving.pods.breaker import Breaker
from specdec.v2 import model_pb2

STALE_SECONDS = 2.5
"""Lifetime of a report in seconds. A pod reports its capacity about once a second on each of its sessions, so an older
report is out of date."""

REFUSED_SECONDS = 0.05
"""Seconds that other requests are refused after a refusal by the verifier. It is short because every ended text makes
room; it only keeps a flood from asking repeatedly."""

MAX_UINT32 = 2**32 - 1
"""Largest value of a message's uint32."""

CROWD_SECONDS = 5.0
"""Seconds within which the sessions of a dead pod end one after another."""


class PodLoad:
    """The sessions of one pod, and its room as last reported."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ours = 0  # open sessions of this process
        self.coming = 0  # sessions this process is about to open
        self.opening = 0  # sessions in `coming` that have passed admission
        self._reported: model_pb2.PodCapacity | None = None
        self._reported_until = 0.0
        self._most, self._most_at = 0, 0.0  # peak of `ours` at the end of a session, and its time
        self._others = 0  # sessions of other processes, as far as known

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count a session of this process while the context lasts."""
        self.ours += 1
        try:
            yield
        finally:
            now = self._clock()
            if self.ours >= self._most or now > self._most_at + CROWD_SECONDS:
                self._most, self._most_at = self.ours, now
            self.ours -= 1

    @property
    def crowd(self) -> int:
        """Sessions of this process, including those that have just ended; at least one."""
        return max(1, self.ours, self._most if self._clock() < self._most_at + CROWD_SECONDS else 0)

    def report(self, reported: model_pb2.PodCapacity, seconds: float = STALE_SECONDS) -> None:
        """Record a report of the pod, valid for `seconds` or until the next one."""
        self._reported, self._reported_until = reported, self._clock() + seconds
        self._others = max(0, reported.sessions - self.ours - self.opening)

    def refused(self, retry_after: float) -> None:
        """Note that the pod had no room for a session, valid for REFUSED_SECONDS. A refusal tells nothing about the
        sessions of other processes: those known before count."""
        known = min(self.ours + self._others, MAX_UINT32)
        self._reported = model_pb2.PodCapacity(sessions=known, wait_us=int(1e6 * retry_after))
        self._reported_until = self._clock() + REFUSED_SECONDS

    @property
    def reported(self) -> model_pb2.PodCapacity | None:
        """The pod's last report while it is valid, else None."""
        return self._reported if self._clock() < self._reported_until else None

    @property
    def now(self) -> model_pb2.PodCapacity | None:
        """The last report while it is valid, else None, with its session count updated by this process's own sessions.
        For display only."""
        if (told := self.reported) is None:
            return None
        found = model_pb2.PodCapacity()
        found.CopyFrom(told)
        found.sessions = min(self.ours + self.opening + self._others, MAX_UINT32)  # a pod may report any number
        return found

    @property
    def sessions(self) -> int:
        """Sessions at the pod, of this process and others, including those about to be opened."""
        return self.ours + self.coming + (self._others if self.reported else 0)


CANCELLED_SECONDS = 1.0
"""Seconds from the start of an opening until its place is free again, if its request is cancelled in that time."""

MAX_CANCELLED = 16
"""Maximum places, in flight or kept, of a tenant with cancelled openings while other tenants are present. At some 4 ms
of processor time each, 16 openings a second cost a fifteenth of a core."""

PRESENT_SECONDS = 10.0
"""Seconds that a tenant counts as present after its last opening."""


class CancelledOpenings:
    """The places of cancelled openings at one verifier, by tenant."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: dict[str, list[float]] = {}  # times at which a tenant's places become free, sorted
        self._sessions: Counter[str] = Counter()
        self._seen: OrderedDict[str, float] = OrderedDict()  # time of each tenant's last opening, latest last

    def opening(self, tenant: str) -> None:
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
        # openings alone reach the limit, even the last place is not enough, and the caller has to ask again.
        return max(0.001, kept[min(len(kept) - 1, openings + len(kept) - MAX_CANCELLED)] - now)

    def _others(self, tenant: str, now: float) -> bool:
        return any(other != tenant for other in self._sessions) or any(
            other != tenant and at >= now - PRESENT_SECONDS for other, at in self._seen.items()
        )


MAX_OPENINGS = 64
"""Limit on openings in flight at a verifier. Answers do not wait for steps, so more openings would only move the queue
from here to the verifier. For a tenant without an opening in flight, the limit is twice as high."""

MAX_WAITING = 16
"""Limit on a tenant's requests that wait for places of its cancelled openings; more are refused before parsing."""


class LeftAloneError(Exception):
    """The verifier is not asked: other requests have just found it unresponsive."""


class Admission:
    """Admission to one verifier."""

    def __init__(self, load: PodLoad, breaker: Breaker, clock: Callable[[], float] = time.monotonic) -> None:
        self._load = load
        self._breaker = breaker
        self._changed = asyncio.Event()  # replaced whenever an opening is over
        self._openings: Counter[str] = Counter()  # openings in flight by tenant, without zeros
        self._waiting: Counter[str] = Counter()  # requests waiting for a place by tenant, without zeros
        self.cancelled = CancelledOpenings(clock)

    @asynccontextmanager
    async def opening(self, tenant: str = "", *, again: bool = False) -> AsyncIterator[None]:
        """Hold a place while a session is being opened. Raise OverloadedError if there is no room, LeftAloneError if
        waiting for room is pointless. A resumed text (`again`) does not wait: the verifier refuses resumed texts
        only at its session limit."""
        load = self._load
        load.coming += 1
        try:
            while not again and (seconds := self._wait(tenant)):
                self._waiting[tenant] += 1
                try:
                    async with asyncio.timeout(None if seconds == math.inf else seconds):
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
                raise  # concerns only this request
            except OverloadedError as refusal:
                load.refused(refusal.retry_after)
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
            problem = f"{self._waiting[tenant]} of its requests wait for the places of its cancelled requests"
            return TenantLimitError(tenant, problem, seconds)
        told = self._load.reported
        if told is None or told.room > (self._load.opening if self._openings[tenant] else 0):
            return None
        return OverloadedError(f"verifier: has {told.sessions} sessions, no capacity for more", told.wait_us / 1e6)

    def _wait(self, tenant: str) -> float:
        """Return the seconds to wait before the next check: 0 if the caller may ask the verifier now, inf if it must
        wait for the end of an opening. OverloadedError if asking is pointless."""
        refusal = self.refusal(tenant)
        if refusal is not None:
            raise refusal
        if seconds := self.cancelled.wait(tenant, self._openings[tenant]):
            return seconds
        # Tenants with openings in flight stop at half the places, so that a tenant's first opening finds one.
        most = MAX_OPENINGS if self._openings[tenant] else 2 * MAX_OPENINGS
        if self._load.reported is None:
            most = 1  # one probe at a time
        return 0.0 if self._load.opening < most else math.inf
