"""Pass times: T_d(n), the seconds of a draft pass over n nodes with all its host work, and the choice of nodes that
pay.

A pass over nodes of path probabilities p_1, ..., p_n yields a path probability of sum(p) / T_d(n) a second. With

    T_d(n) = base + a_node * n

a further node of probability p raises that rate if p > a_node * sum(p) / T_d(n). A less probable node only delays the
next pass, which has likelier nodes, or the next commit, which decides between nodes. Passes are therefore narrow if
there are many sessions or if nodes are costly, and likely chains grow deep sooner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

DECAY = 0.98
"""Weight of a pass relative to the next one."""

MEASURED_WEIGHT = 4.0
"""Weight of each start-up measurement, in passes. It never decays, since passes of a single size determine no slope."""

MAX_SLOWDOWN = 3.0
"""Cap on an observed pass, in multiples of its expected seconds: the process may have lost its core meanwhile."""


class PassTimes:
    """T_d(n) as a weighted least-squares line; recent passes weigh more. `measured`: seconds at start-up by node count;
    ValueError for fewer than two counts.

    Start-up passes run with other texts, other host work and another load. Once served passes have been observed,
    start-up passes contribute only to the slope, which narrow passes alone would not show, and not to the base.
    """

    def __init__(self, measured: Mapping[int, float]) -> None:
        if len(measured) < 2:
            raise ValueError(f"measured must have at least 2 node counts, has {len(measured)}")
        self._measured, self._passes = _Moments(), _Moments()
        for nodes, seconds in measured.items():
            self._measured.add(nodes, seconds, MEASURED_WEIGHT)
        self._fit()

    def of(self, nodes: int) -> float:
        """Return T_d(nodes) in seconds."""
        return self._base + nodes * self._a_node

    def observe(self, nodes: int, seconds: float) -> None:
        self._passes.decay(DECAY)
        self._passes.add(nodes, min(seconds, MAX_SLOWDOWN * self.of(nodes)), 1.0)
        self._fit()

    def break_even(self, probabilities: Sequence[float]) -> float:
        """Return the path probability above which one more node raises the rate of a pass over nodes of these
        `probabilities`."""
        return self._a_node * sum(probabilities) / self.of(len(probabilities))

    def _fit(self) -> None:
        measured, passes = self._measured, self._passes
        slope = (measured.covariance + passes.covariance) / (measured.variance + passes.variance)
        level = passes if passes.weight else measured
        # Noise in the times must make neither the slope nor the base negative.
        self._a_node = min(max(slope, 0.0), level.t / level.n)
        self._base = (level.t - level.n * self._a_node) / level.weight


class _Moments:
    """Weighted sums over passes."""

    def __init__(self) -> None:
        self.weight = self.n = self.nn = self.t = self.nt = 0.0

    def add(self, nodes: int, seconds: float, weight: float) -> None:
        self.weight += weight
        self.n += weight * nodes
        self.nn += weight * nodes * nodes
        self.t += weight * seconds
        self.nt += weight * nodes * seconds

    @property
    def variance(self) -> float:
        """The weighted sum of squared deviations of nodes from their mean."""
        return self.nn - self.n * self.n / self.weight if self.weight else 0.0

    @property
    def covariance(self) -> float:
        """The weighted sum of products of the deviations of nodes and seconds."""
        return self.nt - self.n * self.t / self.weight if self.weight else 0.0

    def decay(self, factor: float) -> None:
        self.weight *= factor
        self.n *= factor
        self.nn *= factor
        self.t *= factor
        self.nt *= factor
