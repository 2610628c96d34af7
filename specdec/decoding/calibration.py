"""Calibration: fits a draft's logprobs to how often the target takes its candidates, by depth and rank.

A draft's own estimate is off in ways that depend on the pair of models: the target takes a node's best child more
often than the draft says, for example, and the third less often. So the estimate's log-odds are shifted. Each depth
below the root and each rank among siblings has a shift of its own, and every verify result moves it a little towards
what was seen (online logistic regression of one parameter; Platt 1999, "Probabilistic outputs for support vector
machines", fits two offline).
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
"""Depths and ranks that have a shift of their own; what is deeper or ranks lower shares the last one."""

LEARNS = 0.02
"""Learning rate: log-odds that a shift moves per unit of error (taken or not, minus the probability)."""

MOST = 3.0
"""Largest shift, in log-odds, in either direction."""

HOTTEST = 2.0
"""Temperature above which all requests share one calibration."""

MAX_TENANTS = 256
"""Tenants whose calibrations are kept; the one that was silent longest is forgotten first."""

LEAST_LOGPROB, MOST_LOGPROB = math.log(1e-6), math.log1p(-1e-6)
"""Range that logprobs are cut to, so that their log-odds stay finite."""


class Calibration:
    """The calibration of one text, or of all texts of a tenant at about one temperature. A text's begins as its
    `tenant`'s, which learns from all of them. `depth` and `rank` count from 0."""

    def __init__(self, tenant: Calibration | None = None) -> None:
        self._tenant = tenant
        self._shifts: list[list[float]] = [[0.0] * RANKS for _ in range(DEPTHS)]
        if tenant is not None:
            self._shifts = [[*row] for row in tenant._shifts]

    def shifts(self, depth: int) -> list[float]:
        """Return the shifts of siblings at this depth, by rank."""
        return self._shifts[min(depth, DEPTHS - 1)]

    def corrected(self, depth: int, logprobs: Sequence[float]) -> list[float]:
        """Return what `corrected` does, for the children of one node."""
        found: list[list[float]] = corrected([self.shifts(depth)], np.array([logprobs])).tolist()
        return found[0]

    def learn(self, depth: int, taken: int | None, logprobs: Iterable[float]) -> None:
        """Learn which of the siblings the target took: rank `taken`, or none. Their logprobs were corrected at this
        depth, wherever they are now."""
        self._shift(depth, [(rank == taken) - math.exp(logprob) for rank, logprob in enumerate(logprobs)])

    def _shift(self, depth: int, errors: Sequence[float]) -> None:
        """Move the shifts of siblings at this depth, here and at the tenant's, by what their probabilities were off."""
        if self._tenant is not None:
            self._tenant._shift(depth, errors)
        shifts = self.shifts(depth)
        for rank, error in enumerate(errors):
            at = min(rank, RANKS - 1)
            shifts[at] = max(-MOST, min(MOST, shifts[at] + LEARNS * error))


class Calibrations:
    """The calibrations of one draft-target pair, by tenant: one tenant's texts, however odd, do not change what another
    tenant's candidates are taken for. Requests with one rule and about one temperature share one."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, dict[tuple[Rule, float], Calibration]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, sampler: RequestSampler, tenant: str) -> Calibration:
        """Return the calibration of a new text. Any thread may ask."""
        kind = sampler.rule, round(min(sampler.sampling.temperature, HOTTEST), 1)
        with self._lock:
            known = self._known.setdefault(tenant, {})
            self._known.move_to_end(tenant)
            if len(self._known) > MAX_TENANTS:
                self._known.popitem(last=False)
            return Calibration(known.setdefault(kind, Calibration()))


def corrected(shifts: Sequence[Sequence[float]], logprobs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the calibrated logprobs of the children of n nodes: [n, width], best first, none above the one before it.
    `shifts` are those of each node's depth. Logprobs of -inf stand for no child, and stay."""
    likely = np.minimum(np.maximum(logprobs, LEAST_LOGPROB), MOST_LOGPROB)
    of_ranks = np.array(shifts).take(np.arange(logprobs.shape[1]), axis=1, mode="clip")
    odds = likely - np.log(-np.expm1(likely)) + of_ranks
    ordered = np.minimum.accumulate(-np.logaddexp(0.0, -odds), axis=1)
    return np.where(logprobs > -np.inf, ordered, -np.inf)
