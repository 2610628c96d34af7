"""How many draft pods a verifier needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil

VERIFIERS = (8, 4, 2)
"""Verifiers that may share a draft pod, the most first. One that has a pod to itself is not helped by another: a text
has one draft at a time."""

ENOUGH = 0.95
"""Part of the best speed that is good enough: a pod more for the rest of it does not pay."""


@dataclass(frozen=True)
class Pools:
    """So many verifiers for a draft pod, and what comes of it."""

    verifiers: int
    rate: float  # tokens a second of a verifier
    best: float  # the rate of one that has a draft pod to itself

    def replicas(self, streams: int, concurrent: int) -> tuple[int, int]:
        """Return how many verifiers and drafts serve so many concurrent texts, where a verifier has `streams`."""
        verifiers = ceil(concurrent / streams)
        return verifiers, ceil(verifiers / self.verifiers)


def smallest(rate: Callable[[float], float], alone: float) -> Pools:
    """Return the fewest drafts that are enough. `rate` gives tokens a second of a verifier with a draft at this part of
    its speed, since a pod that drafts for two verifiers is about half as fast for each; `alone` is that with all of
    it."""
    for verifiers in VERIFIERS:
        found = rate(1 / verifiers)
        if found >= ENOUGH * alone:
            return Pools(verifiers, found, max(alone, found))
    return Pools(1, alone, alone)
