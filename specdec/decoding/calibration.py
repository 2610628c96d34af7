"""What the verdicts teach about scores: how often the target takes a child, by its depth and its rank.

A draft's own estimate is off in ways that depend on the pair: the best child of a node is taken more often than it
says, say, and the third less. So the estimate's log-odds are shifted, by an amount for each depth below the tip and
each rank among siblings, which every verdict moves a little towards what was seen (online logistic regression of
one parameter; Platt 1999, "Probabilistic outputs for support vector machines", fits two offline).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from specdec.decoding.choice import RequestSampler
from specdec.decoding.sampling import Rule

DEPTHS, RANKS = 4, 4
"""Told apart; what is deeper or ranks lower counts with the last."""

LEARNS = 0.02
MOST = 3.0
"""Log-odds, either way."""

HOTTEST = 2.0
"""Temperatures above it are not told apart."""

LEAST = 1e-6
"""Probabilities are kept so far from 0 and 1."""


class Calibration:
    """Of one pair at about one temperature. `depth` and `rank` count from 0."""

    def __init__(self) -> None:
        self._shifts = [[0.0] * RANKS for _ in range(DEPTHS)]

    def corrected(self, depth: int, logprobs: Iterable[float]) -> list[float]:
        """Log-probabilities of siblings, best first, as the verdicts have it; none above the one before it."""
        shifts = self._shifts[min(depth, DEPTHS - 1)]
        result: list[float] = []
        for rank, logprob in enumerate(logprobs):
            odds = _log_odds(math.exp(logprob)) + shifts[min(rank, RANKS - 1)]
            corrected = -math.log1p(math.exp(-odds))
            result.append(min(corrected, result[-1]) if result else corrected)
        return result

    def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
        """Of siblings with these corrected scores the target took the one of rank `taken`, or none."""
        shifts = self._shifts[min(depth, DEPTHS - 1)]
        for rank, logprob in enumerate(logprobs):
            at = min(rank, RANKS - 1)
            shift = shifts[at] + LEARNS * ((rank == taken) - math.exp(logprob))
            shifts[at] = max(-MOST, min(MOST, shift))


class Calibrations:
    """Of one pair: requests of one rule and about one temperature learn together."""

    def __init__(self) -> None:
        self._known: defaultdict[tuple[Rule, float], Calibration] = defaultdict(Calibration)

    def of(self, sampler: RequestSampler) -> Calibration:
        return self._known[sampler.rule, round(min(sampler.sampling.temperature, HOTTEST), 1)]


def _log_odds(probability: float) -> float:
    p = min(max(probability, LEAST), 1.0 - LEAST)
    return math.log(p / (1.0 - p))
