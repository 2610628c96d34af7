"""Pass times: T_d(n), the seconds of a draft pass over n nodes with all its host work, and which nodes are worth it.

A pass that computes nodes of path probabilities p_1, ..., p_n yields sum(p) / T_d(n) a second. With

    T_d(n) = base + a_node * n

a further node of probability p raises that rate if p > a_node * sum(p) / T_d(n). Below, it only delays what comes next:
likelier nodes, or the commit that decides between them. So many sessions or a costly node make passes narrow, and
likely chains grow deep sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

DECAY = 0.98
"""Weight of a pass relative to the next one."""

MEASURED_WEIGHT = 4.0
"""Weight of each start-up measurement, in passes. It never decays: passes of a single size determine no slope."""

MAX_SLOWDOWN = 3.0
"""Cap on an observed pass, in multiples of its expected seconds: the process may have lost its core meanwhile."""


class PassTimes:
    """T_d(n) as a weighted least-squares line; recent passes weigh more. `measured`: seconds at start-up by node count,
    of at least two counts. ValueError if there are fewer."""

    def __init__(self, measured: Mapping[int, float]) -> None:
        if len(measured) < 2:
            raise ValueError(f"measured must have at least 2 node counts, has {len(measured)}")
        points = [_moments(nodes, seconds) for nodes, seconds in measured.items()]
        self._measured = MEASURED_WEIGHT * np.sum(points, axis=0)
        self._passes = np.zeros_like(self._measured)
        self._fit()

    def of(self, nodes: int) -> float:
        """Return T_d(nodes) in seconds."""
        return self._base + nodes * self._a_node

    def observe(self, nodes: int, seconds: float) -> None:
        """Learn from a pass."""
        self._passes *= DECAY
        self._passes += _moments(nodes, min(seconds, MAX_SLOWDOWN * self.of(nodes)))
        self._fit()

    def break_even(self, probabilities: Sequence[float]) -> float:
        """Return the path probability above which one more node raises the rate of a pass over nodes of these
        `probabilities`."""
        return self._a_node * sum(probabilities) / self.of(len(probabilities))

    def _fit(self) -> None:
        weight, n, nn, t, nt = map(float, self._measured + self._passes)
        slope = (weight * nt - n * t) / (weight * nn - n * n)
        self._a_node = min(max(slope, 0.0), t / n)  # noise must make neither a node nor an empty pass cost less than 0
        self._base = (t - n * self._a_node) / weight


def _moments(nodes: int, seconds: float) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """Return what the fit sums over passes [5]: 1, n, n^2, seconds, n * seconds."""
    return np.array([1.0, nodes, nodes * nodes, seconds, nodes * seconds])
