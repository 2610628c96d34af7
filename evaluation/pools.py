"""The number of draft pods a verifier needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

VERIFIERS = (8, 4, 2)
"""Numbers of verifiers that may share a draft pod, largest first. A verifier gains nothing from more than one pod: a
text has one draft at a time."""

ENOUGH = 0.95
"""Share of the best speed that suffices: more is not worth another pod."""


@dataclass(frozen=True)
class PoolSizing:
    """Verifiers per draft pod, and the resulting speed."""

    verifiers: int
    rate: float  # tokens a second of a verifier
    best: float  # the rate of a verifier with a draft pod to itself

    @property
    def left_out(self) -> int:
        """Number of sizes that `smallest` did not measure, since a larger number of verifiers sufficed."""
        return sum(verifiers < self.verifiers for verifiers in VERIFIERS)

    def replicas(self, streams: int, concurrent: int) -> tuple[int, int]:
        """Return the numbers of verifiers and drafts for `concurrent` texts, with `streams` texts a verifier."""
        verifiers = ceil(concurrent / streams)
        return verifiers, ceil(verifiers / self.verifiers)


def smallest(rate: Callable[[float], float], alone: float) -> PoolSizing:
    """Return the smallest sufficient pool. `rate` maps a draft's relative speed to a verifier's tokens a second: a pod
    shared by two verifiers is about half as fast for each. `alone` is the rate at full speed."""
    for verifiers in VERIFIERS:
        found = rate(1 / verifiers)
        if found >= ENOUGH * alone:
            return PoolSizing(verifiers, found, max(alone, found))
    return PoolSizing(1, alone, alone)
