"""Max-min fair division: the unused part of a tenant's share goes to the others (Bertsekas and Gallager 1992, "Data
Networks", 6.5.2)."""

from __future__ import annotations

from collections.abc import Mapping


class Pool:
    """An amount, of seconds or rows, divided among tenants by their weights."""

    def __init__(self, amount: float, weights: Mapping[str, float]) -> None:
        self._amount = max(0.0, amount)
        self._weights = weights
        self._waiting = sum(weights.values())

    def order(self, wanted: Mapping[str, float]) -> list[str]:
        """Return the tenants in the order of taking their parts: least demand per weight first."""
        return sorted(wanted, key=lambda tenant: wanted[tenant] / self._weights[tenant])

    def part(self, tenant: str) -> float:
        """Return the fair part of the next tenant in that order."""
        return self._amount * self._weights[tenant] / self._waiting

    def take(self, tenant: str, amount: float) -> None:
        """Subtract the amount taken by a tenant."""
        self._amount = max(0.0, self._amount - amount)
        self._waiting -= self._weights[tenant]
