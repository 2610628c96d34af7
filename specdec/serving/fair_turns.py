"""Fairness between owners: a max-min division of a total, and places taken in turns."""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping


class SharedBudget:
    """An amount of seconds or rows, divided among tenants by their weights."""

    def __init__(self, amount: float, weights: Mapping[str, float]) -> None:
        self._amount = max(0.0, amount)
        self._weights = weights
        self._waiting = sum(weights.values())

    def order(self, wanted: Mapping[str, float]) -> list[str]:
        """Return the tenants in the order in which to take their parts: least demand per weight first."""
        return sorted(wanted, key=lambda tenant: wanted[tenant] / self._weights[tenant])

    def part(self, tenant: str) -> float:
        """Return the fair part of the next tenant in that order."""
        return self._amount * self._weights[tenant] / self._waiting

    def take(self, tenant: str, amount: float) -> None:
        """Subtract the amount taken by a tenant."""
        self._amount = max(0.0, self._amount - amount)
        self._waiting -= self._weights[tenant]


class FairTurns:
    """`places` that owners hold for a while. A free place goes to the owner that has waited longest for its turn;
    within an owner, first come, first served. With `reserve`, a named owner never holds all of several places, so
    other owners wait at most one turn."""

    def __init__(self, places: int, *, reserve: bool = False) -> None:
        self._free = places
        self._most = max(1, places - 1) if reserve else places
        self._places = places
        self._held: Counter[str] = Counter()
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()  # in order of turns

    async def acquire(self, owner: str) -> None:
        """Wait for a place."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self.release(owner)  # granted to a cancelled caller
            else:
                self._leave(owner, granted)
            raise

    def release(self, owner: str) -> None:
        """Give a place back."""
        self._free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._grant()

    @property
    def taken(self) -> int:
        """Number of places held."""
        return self._places - self._free

    def _leave(self, owner: str, granted: asyncio.Future[None]) -> None:
        queue = self._waiting.get(owner)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[owner]

    def _grant(self) -> None:
        while self._free and (owner := self._next()) is not None:
            queue = self._waiting.pop(owner)
            granted = queue.popleft()
            if queue:
                self._waiting[owner] = queue  # behind all others
            if granted.done():  # its caller was cancelled
                continue
            self._free -= 1
            self._held[owner] += 1
            granted.set_result(None)

    def _next(self) -> str | None:
        return next((owner for owner in self._waiting if self._may_take(owner)), None)

    def _may_take(self, owner: str) -> bool:
        return self._held[owner] < (self._most if owner else self._places)
