"""How many draft pods a verifier needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

SHARES = ((1, 8), (1, 4), (1, 2), (1, 1), (2, 1))
"""Drafts, and verifiers that share them: the fewest first."""

MOST = (4, 1)
"""As many as can be of use."""

ENOUGH = 0.95
"""Part of the best speed that is good enough: a pod more for the rest of it does not pay."""


@dataclass(frozen=True)
class Pools:
    """So many draft pods for so many verifiers, and what comes of it."""

    drafts: int
    verifiers: int
    rate: float  # tokens a second of a verifier
    best: float  # the rate with as many drafts as can be of use

    def replicas(self, streams: int, concurrent: int) -> tuple[int, int]:
        """Return how many verifiers and drafts serve so many concurrent texts, where a verifier has `streams`."""
        verifiers = ceil(concurrent / streams)
        return verifiers, ceil(verifiers * self.drafts / self.verifiers)


def smallest(rate: Callable[[float], float]) -> Pools:
    """Return the fewest drafts that are enough. `rate` gives tokens a second of a verifier that has this part of a
    draft pod to itself: a pod that drafts for two verifiers is half as fast for each."""
    best = rate(MOST[0] / MOST[1])
    for drafts, verifiers in SHARES:
        found = rate(drafts / verifiers)
        if found >= ENOUGH * best:
            return Pools(drafts, verifiers, found, max(best, found))
    return Pools(*MOST, best, best)
