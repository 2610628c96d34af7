"""Step latency: T_v(n), the seconds of a step over n rows, learned from steps without prompts."""

from __future__ import annotations

import math
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import structlog

from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, chains_only, launch_of
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import Slots
from specdec.engine.tile_size import cheapest
from verifier_service.settings.tuning import DEFAULTS, LatencyTuning

log = structlog.get_logger()

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 5
"""Rounds over all MEASURED_ROWS. Row counts are interleaved, so that a temporary slowdown of the machine affects all of
them alike: their ratios matter."""

MIN_ROUNDS = 2
"""Minimum number of rounds: the first one includes the compilation of kernels."""

ENOUGH = 0.5
"""Seconds of steps after which no further round begins: real steps keep updating the latency."""

STEEP_ROWS = 16
"""Row count above which latency grows linearly (as measured)."""

WARM_UP_KEYS = 32
"""Committed tokens attended to by each row at warm-up."""

LONG = 0.2
"""Seconds of a step beyond which no larger step is tried."""

ONCE = 1.0
"""Seconds of a step beyond which it is not repeated, unless it was delayed."""

DELAYED = 2.0
"""A step counts as delayed if it takes this many times as long as a step over more rows, or as the pace of a smaller
step predicts. The usual cause is kernel compilation, which takes seconds in Triton."""

GREEDY = SamplingQuery(RequestSampler(Sampling()), WARM_UP_KEYS)
"""The sampling query of every row at warm-up."""

ROUNDING = 1e-12
"""Upper bound on the relative rounding error of a step time after a multiplication and a division by the speed."""

MANY = 1 << 20
"""The number of rows returned in place of infinity, if rows cost nothing."""

MATERIAL = 0.01
"""The table is rebuilt if the logarithm of any point's time has changed by more than this beyond the points' mean
change; else it is scaled by the mean change, since rebuilding takes longer than the rest of `observe`."""

UNPAID_STEPS = 8
"""Minimum interval, in steps, between experiments with fewer rows while there is no exploration budget."""

MIN_VARIANCE = 1e-6
"""Lower bound on the variances used as weights of points."""


class StepLatency:
    """T_v(n) in seconds: piecewise linear between measured points, non-decreasing, updated by every step.

    The logarithms x of the points are the state of a Kalman filter with covariance P. Per second of steps, P grows by
    speed_drift^2 * 1 1^T + shape_drift^2 * I: the speed of the machine, common to all points, changes within seconds;
    the shape of the curve changes slowly. A step over n rows observes h^T x to first order, with h the two neighbouring
    points' shares of the predicted time. The measurement at start-up is the first estimate, with a wide error, so that
    a few steps outweigh it.

    The error of an unvisited point grows again. Then a step may *explore* the point, that is, take more rows than the
    current estimate justifies. Exploring has a budget, a fraction of the time of all steps.

    Noise is one-sided: other processes may make a step take longer than its rows need, but never less. So a step faster
    than expected gets more weight than a slower one, and a delayed step gets little.
    """

    def __init__(self, rows: tuple[int, ...], seconds: list[float], tuning: LatencyTuning = DEFAULTS.latency) -> None:
        count = len(rows)
        self._tuning = tuning
        self._points = rows
        self._rows = np.asarray(rows, dtype=np.float64)
        self._start = np.asarray(seconds, dtype=np.float64)
        self._logs = np.log(self._start)
        self._errors = tuning.speed_drift**2 + tuning.start_error**2 * np.eye(count)  # covariance of `_logs`
        self._drift = tuning.speed_drift**2 + tuning.shape_drift**2 * np.eye(count)  # added per second of steps
        self._budget = tuning.first_exploration_seconds
        self._exploring: float | None = None  # the coming step's worth in seconds (see explore), if it explores
        self._steps_since = 0  # steps since the last exploring one; the first of them is a baseline, not exploring
        self._tabulate()

    @classmethod
    def measure(
        cls, engine: Engine, slots: int, tuning: LatencyTuning = DEFAULTS.latency, enough: float = ENOUGH
    ) -> StepLatency:
        """Measure the latency by running the engine over its first `slots` slots; no session may hold them yet. No
        further round begins after `enough` seconds of steps."""
        room = slots // BLOCK if chains_only(engine) else slots - WARM_UP_KEYS
        rows = tuple(n for n in MEASURED_ROWS if n < room)
        return cls(rows, least_seconds(rows, lambda count: step_seconds(engine, count), enough), tuning)

    def of(self, rows: int) -> float:
        """Return T_v(rows); the last segment is extended beyond the last measured point."""
        return self._speed * self._tabled(rows)

    def span(self, first: int, end: int) -> list[float]:
        """Return T_v of every number of rows in [first, end)."""
        seconds = [self._speed * time for time in self._table[first:end]]
        return seconds + [self.of(rows) for rows in range(first + len(seconds), end)]

    def rows_within(self, seconds: float) -> int:
        """Return the largest number of rows with a step time of at most `seconds`; given T_v(n), it returns at least
        n."""
        table, seconds = self._table, seconds / self._speed * (1.0 + ROUNDING)
        if seconds < table[-1]:
            return max(0, bisect_right(table, seconds) - 1)
        if self._slope * MANY <= seconds - table[-1]:
            return MANY
        rows = len(table) - 1 + int((seconds - table[-1]) / self._slope)
        while self._tabled(rows + 1) <= seconds:  # correct for rounding in the division
            rows += 1
        while self._tabled(rows) > seconds:
            rows -= 1
        return min(rows, MANY)

    def _tabled(self, rows: int) -> float:
        table = self._table
        return table[rows] if rows < len(table) else table[-1] + (rows - len(table) + 1) * self._slope

    # --- exploring ----------------------------------------------------------------------------------

    @property
    def may_explore(self) -> bool:
        """True if the coming step may explore more rows than pay."""
        return self._budget > 0.0 and self._steps_since > 0

    def next_point(self, rows: int) -> int:
        """Return the first measured point above `rows`, or `rows` + 1 if there is none."""
        place = bisect_right(self._points, rows)
        return self._points[place] if place < len(self._points) else rows + 1

    def optimistic(self, rows: int, more: int) -> float:
        """Return an optimistic T_v(more), lower by `optimism` standard errors relative to T_v(rows). Without
        uncertainty or exploration budget, return the estimate itself."""
        estimate = self.of(more)
        if self._budget <= 0.0 or more > self._points[-1]:
            return estimate
        error = self._error(rows, more)
        if error <= self._tuning.certain_error:
            return estimate
        return max(self.of(rows), estimate * math.exp(-self._tuning.optimism * error))

    def uncertain_below(self, rows: int, least: int) -> int:
        """Return the number of rows to experiment with: the last measured point below `rows`, or `least` if that is
        larger. Return `rows` if the time saved is certain, or the coming step may not experiment. The experiment costs
        few tokens, so it is sometimes made even without budget: if fewer rows turn out better, further experiments cost
        no budget."""
        due = self.may_explore or self._steps_since >= UNPAID_STEPS
        if rows == least or rows > self._points[-1] or not due:
            return rows
        point = max(least, self._points[bisect_left(self._points, rows) - 1])
        return point if self._error(rows, point) > self._tuning.certain_error else rows

    def explore(self, worth: float) -> None:
        """Note that the coming step explores. `worth`: seconds that a step without exploration would take for the same
        number of tokens; the budget pays for any time beyond."""
        self._exploring = worth

    def _error(self, rows: int, other: int) -> float:
        """Return the standard error of log(T_v(rows) / T_v(other))."""
        places = self._place(rows), self._place(other)
        ends = [
            (point, sign * w)
            for sign, (left, right, weight) in zip((1.0, -1.0), places, strict=True)
            for point, w in ((left, 1.0 - weight), (right, weight))
            if w
        ]
        variance = sum(w * v * self._errors[i][j] for i, w in ends for j, v in ends)
        return math.sqrt(max(0.0, variance))

    # --- learning -----------------------------------------------------------------------------------

    def observe(self, rows: int, seconds: float) -> None:
        """Update the filter with a step."""
        if rows > self._points[-1] or seconds <= 0.0:
            return
        tuning = self._tuning
        self._errors += seconds * self._drift
        left, right, weight = self._place(rows)
        of_left, of_right = (1.0 - weight) * math.exp(self._logs[left]), weight * math.exp(self._logs[right])
        surprise = math.log(seconds / (of_left + of_right))
        step_error = tuning.step_error
        if surprise > 0.0:
            # Slower than expected may be a delay: less weight, and a bounded effect.
            surprise, step_error = min(surprise, tuning.most_slower), tuning.slower_step_error
        weight = of_right / (of_left + of_right)
        covariance = (1.0 - weight) * self._errors[left] + weight * self._errors[right]
        variance = (1.0 - weight) * covariance[left] + weight * covariance[right] + step_error**2
        self._logs += covariance * (surprise / variance)
        self._errors -= np.outer(covariance, covariance / variance)
        moved = self._logs - self._tabulated
        common = float(moved.sum()) / len(moved)
        # A common change of all points scales the table; only a change of shape rebuilds it.
        if np.abs(moved - common).max() > MATERIAL:
            self._tabulate()
        else:
            self._speed = math.exp(common)
        self._charge(rows, seconds)

    def become(self, rows: int, seconds: float) -> None:
        """Scale the whole function so that a step over `rows` rows takes `seconds`."""
        self._logs += math.log(seconds / self.of(rows))
        self._tabulate()

    def _charge(self, rows: int, seconds: float) -> None:
        """Add the step's share to the budget. If the step explored, charge the seconds beyond what its tokens are worth
        (`_exploring`). Seconds beyond the expected latency do not count: they are a delay."""
        tuning = self._tuning
        self._budget = min(self._budget + tuning.exploration_share * seconds, tuning.first_exploration_seconds)
        if self._exploring is None:
            self._steps_since += 1
        else:
            self._budget -= max(0.0, min(seconds, self.of(rows)) - self._exploring)
            self._exploring, self._steps_since = None, 0

    def _place(self, rows: int) -> tuple[int, int, float]:
        """Return the indices of the measured points around `rows` (at most the last point), and the weight of the right
        one."""
        right = bisect_left(self._points, rows)
        left = max(0, right - 1)
        span = self._points[right] - self._points[left]
        return left, right, (rows - self._points[left]) / span if span else 1.0

    def _tabulate(self) -> None:
        """Tabulate T_v at every number of rows up to the last measured one: each step looks up many values."""
        self._tabulated, self._speed = self._logs.copy(), 1.0  # logarithms in the table, and the factor on the table
        own = self._errors.diagonal() - self._errors.min()  # without the common part, which does not change the shape
        points = never_falling(self._logs.tolist(), own.tolist())
        seconds = self._start * np.exp(points - np.log(self._start))  # exact before any update
        seconds = np.maximum.accumulate(seconds)  # equal values may differ by rounding
        table = np.interp(np.arange(self._points[-1] + 1), self._rows, seconds)
        self._table: list[float] = np.maximum.accumulate(table).tolist()
        self._slope = float((seconds[-1] - seconds[-2]) / (self._rows[-1] - self._rows[-2]))


def never_falling(values: Sequence[float], variances: Sequence[float]) -> list[float]:
    """Return the non-decreasing values nearest to these, weighted by inverse variance: falling neighbours are replaced
    by their mean (isotonic regression by pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # value, weight, length
    for value, variance in zip(values, variances, strict=True):
        pool = value, 1.0 / max(variance, MIN_VARIANCE), 1
        while pools and pools[-1][0] > pool[0]:
            value_before, weight_before, length = pools.pop()
            weight = weight_before + pool[1]
            pool = (value_before * weight_before + pool[0] * pool[1]) / weight, weight, length + pool[2]
        pools.append(pool)
    return [value for value, _, length in pools for _ in range(length)]


def least_seconds(rows: Sequence[int], seconds: Callable[[int], float], enough: float) -> list[float]:
    """Return the minimum seconds of a step over each row count, from several rounds; `seconds(count)` times a step.

    To bound the start-up time of large models, measuring stops at the first step of at least STEEP_ROWS rows that takes
    longer than LONG. Larger counts are extrapolated linearly.
    """
    least: dict[int, float] = {}
    total = 0.0
    for count in rows:
        tries = [seconds(count)]
        # Probably delayed: repeat the step, since a long one ends the measurement.
        if least and tries[0] > max(LONG, DELAYED * count / max(least) * least[max(least)]):
            tries.append(seconds(count))
        least[count], total = min(tries), total + sum(tries)
        if least[count] > LONG and count >= STEEP_ROWS:
            break
    shortest = list(accumulate(reversed(least.values()), min))[::-1]  # minimum over this and all larger counts
    # Repeat short steps, and delayed ones: these took much longer than a step over more rows.
    again = [n for n, more in zip(least, shortest, strict=True) if least[n] <= ONCE or least[n] > DELAYED * more]
    for done in range(1, REPEATS):
        if done >= MIN_ROUNDS and total >= enough:
            break
        for count in again:
            took = seconds(count)
            total, least[count] = total + took, min(least[count], took)
    (one, before), (last, longest) = list(least.items())[-2:]
    slope = max(0.0, longest - before) / (last - one)
    return [least.get(count, longest + slope * (count - last)) for count in rows]


def best_prefill_rows(engine: Engine, slots: int, most: int) -> int:
    """Return the smallest number of prompt rows, up to `most`, with the lowest time per row: arrivals wait for the end
    of a step, so larger steps only add latency. The engine runs over its first `slots` slots, which no session may hold
    yet; with too few slots, return `most`."""
    room = slots // BLOCK * WARM_UP_KEYS if chains_only(engine) else slots
    best = cheapest(lambda rows: _timed_prefill(engine, rows), most, LONG, few=True) if most < room else most
    log.info("prefill_rows", best=best)
    return best


def _timed_prefill(engine: Engine, rows: int) -> float:
    """Return the seconds of a step over `rows` rows of short prompts."""
    packer = engine.packer()
    for begin in range(0, rows, WARM_UP_KEYS):
        first = BLOCK * begin // WARM_UP_KEYS if chains_only(engine) else 1 + begin
        own = first + np.arange(min(rows - begin, WARM_UP_KEYS))
        packer.add_path(own, packer.add_rows([0] * len(own), 0, own))
    packer.want(0)
    return _seconds(engine, packer, 1)


def step_seconds(engine: Engine, rows: int) -> float:
    """Run a step over the last rows of `rows` short texts, in slots that no session may hold; return its seconds."""
    packer = engine.packer()
    for row in range(rows):
        keys = _keys(engine, row)
        index = packer.add_row(0, WARM_UP_KEYS, int(keys[-1]))
        packer.add_path(keys, [index])
        packer.want(index)
    return _seconds(engine, packer, rows)


def _keys(engine: Engine, row: int) -> Slots:
    """Return the slots of a text ending with this row. Texts share the slots before their last row, unless the engine
    needs separate blocks for each text."""
    if chains_only(engine):
        return BLOCK * row + np.arange(WARM_UP_KEYS + 1)
    return np.append(np.arange(1, 1 + WARM_UP_KEYS), 1 + WARM_UP_KEYS + row)


def _seconds(engine: Engine, packer: Packer, wanted: int) -> float:
    """Run a step and return its seconds; `wanted`: the number of its wanted rows."""
    launch = launch_of(engine)
    start = time.perf_counter()
    launch(packer.pack()).logits(lambda: dict.fromkeys(range(wanted), GREEDY))
    return time.perf_counter() - start
