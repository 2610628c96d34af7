"""Calibration of a draft's logprobs to the target's observed acceptance, by depth and rank.

A draft's estimates are biased in ways specific to the pair of models: for example, the target takes a node's best child
more often than estimated, and the third less often. The correction is a shift of the estimate's log-odds, one for each
depth below the root and rank among siblings. Every verify result moves a shift slightly towards the observation. This
is online logistic regression of one parameter (Platt 1999, "Probabilistic outputs for support vector machines", fits
two offline).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Rule

DEPTHS, RANKS = 4, 4
"""Depths and ranks with their own shift; deeper nodes and lower ranks use the last one."""

LEARNS = 0.02
"""Learning rate: change of a shift, in log-odds, per unit of error (outcome minus estimated probability)."""

MAX_SHIFT = 3.0
"""Largest absolute shift, in log-odds."""

HOTTEST = 2.0
"""Temperature above which a calibration no longer depends on the temperature."""

MAX_TENANTS = 256
"""Tenants with calibrations in memory; the least recently used one is evicted first."""

MIN_LOGPROB, MAX_LOGPROB = math.log(1e-6), math.log1p(-1e-6)
"""Range to which logprobs are clipped, so that their log-odds stay finite."""


class Calibration:
    """The calibration of one text, or of a tenant's texts at about the same temperature. A text starts with a copy of
    its `tenant`'s calibration, which learns from all of the tenant's texts. `depth` and `rank` count from 0."""

    def __init__(self, tenant: Calibration | None = None) -> None:
        self._tenant = tenant
        self._shifts: list[list[float]] = [[0.0] * RANKS for _ in range(DEPTHS)]
        if tenant is not None:
            self._shifts = [[*row] for row in tenant._shifts]

    def shifts(self, depth: int) -> list[float]:
        """Return the shifts of siblings at this depth, by rank."""
        return self._shifts[min(depth, DEPTHS - 1)]

    def corrected(self, depth: int, logprobs: Sequence[float]) -> list[float]:
        """Return the calibrated logprobs of one node's children; the function `corrected` does this for n nodes."""
        found: list[list[float]] = corrected([self.shifts(depth)], np.array([logprobs])).tolist()
        return found[0]

    def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
        """Learn from one verification of siblings: the target took the one of rank `taken`, or none of them. `depth` is
        their depth when `logprobs` were corrected; commits may have moved them up since."""
        shifts = self.shifts(depth)
        odds = [_log_odds(logprob) - shifts[min(rank, RANKS - 1)] for rank, logprob in enumerate(logprobs)]
        for calibration in (self, self._tenant):
            if calibration is not None:
                calibration._learn(depth, taken, odds)

    def _learn(self, depth: int, taken: int | None, odds: Sequence[float]) -> None:
        """Learn from siblings with these uncorrected log-odds, by the errors of this calibration's own estimates. With
        the errors of its texts, a tenant's calibration would move n times as far as each of n concurrent texts."""
        shifts = self.shifts(depth)
        errors = [
            (rank == taken) - 1.0 / (1.0 + math.exp(-odd - shifts[min(rank, RANKS - 1)]))
            for rank, odd in enumerate(odds)
        ]
        for rank, error in enumerate(errors):
            at = min(rank, RANKS - 1)
            shifts[at] = max(-MAX_SHIFT, min(MAX_SHIFT, shifts[at] + LEARNS * error))


class Calibrations:
    """The calibrations of one draft-target pair, by tenant: one tenant's unusual texts do not affect another tenant's
    candidates. A tenant's requests with the same rule and about the same temperature share a calibration."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[tuple[Rule, float], Calibration]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, sampler: RequestSampler, tenant: str) -> Calibration:
        """Return the calibration of a new text. Thread-safe."""
        kind = sampler.rule, round(min(sampler.sampling.temperature, HOTTEST), 1)
        with self._lock:
            known = self._known.setdefault(tenant, {})
            self._known.move_to_end(tenant)
            if len(self._known) > MAX_TENANTS:
                self._known.popitem(last=False)
            return Calibration(known.setdefault(kind, Calibration()))


def _log_odds(logprob: float) -> float:
    likely = max(MIN_LOGPROB, min(MAX_LOGPROB, logprob))
    return likely - math.log(-math.expm1(likely))


def corrected(shifts: Sequence[Sequence[float]], logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the calibrated logprobs of the children of n nodes: [n, width], best first, never rising along a row.
    `shifts` holds the shifts at each node's depth. A logprob of -inf means no child and is kept."""
    likely = np.minimum(np.maximum(logprobs, MIN_LOGPROB), MAX_LOGPROB)
    of_ranks = np.array(shifts).take(np.arange(logprobs.shape[1]), axis=1, mode="clip")
    odds = likely - np.log(-np.expm1(likely)) + of_ranks
    ordered = np.minimum.accumulate(-np.logaddexp(0.0, -odds), axis=1)
    return np.where(logprobs > -np.inf, ordered, -np.inf)
