"""Step latency: T_v(n), the seconds of a step over n rows, measured at start and corrected by steps without prompts."""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
import structlog

from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, chains_only, step_of
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import Slots
from specdec.engine.tile_size import cheapest
from verifier_service.settings.tuning import DEFAULTS, LatencyTuning

log = structlog.get_logger()

MEASURED_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
REPEATS = 5
"""Rounds over all MEASURED_ROWS, so that a slow spell of the machine affects all alike: their ratios matter."""

LEAST_ROUNDS = 2
"""Rounds that are always run: in the first one kernels are made."""

ENOUGH = 0.5
"""Seconds of steps after which no further round begins: steps go on teaching the latency."""

STEEP_ROWS = 16
"""Rows from which a further one costs what it does in any larger step, as far as is known."""

WARM_UP_KEYS = 32
"""Number of committed tokens that each row attends to at warm-up."""

LONG = 0.2
"""Seconds of a step beyond which no larger step is tried."""

ONCE = 1.0
"""Seconds of a step beyond which it is not repeated, unless something else delayed it."""

DELAYED = 2.0
"""A step that takes so many times as long as a step over more rows, or as its rows would at the pace of a step over
fewer, was delayed: kernels were made, and Triton may compile one for seconds."""

GREEDY = SamplingQuery(RequestSampler(Sampling()), WARM_UP_KEYS)
"""The sampling query of every row at warm-up."""

MANY = 1 << 20
"""Number of rows that stands for any number, where rows cost nothing."""


class StepLatency:
    """A piecewise linear T_v(n), in seconds, that never falls."""

    def __init__(self, rows: tuple[int, ...], seconds: list[float], tuning: LatencyTuning = DEFAULTS.latency) -> None:
        self._tuning = tuning
        self._rows = np.asarray(rows, dtype=np.float64)
        self._seconds = np.asarray(seconds)
        self._tabulate()

    @classmethod
    def measure(
        cls, engine: Engine, slots: int, tuning: LatencyTuning = DEFAULTS.latency, enough: float = ENOUGH
    ) -> StepLatency:
        """Measure the latency by running the engine over its first `slots` slots, which no session may use yet. Once
        steps have taken `enough` seconds, no further round begins."""
        room = slots // BLOCK if chains_only(engine) else slots - WARM_UP_KEYS
        rows = tuple(n for n in MEASURED_ROWS if n < room)
        return cls(rows, least_seconds(rows, lambda count: _timed(engine, count), enough), tuning)

    def of(self, rows: int) -> float:
        """Return T_v(rows); beyond the last measured point, the last segment is extended."""
        table = self._table
        if rows < len(table):
            return table[rows]
        return table[-1] + (rows - len(table) + 1) * self._slope

    def rows_within(self, seconds: float) -> int:
        """Return the largest number of rows whose step takes at most `seconds`."""
        table = self._table
        if seconds < table[-1]:
            return max(0, bisect_right(table, seconds) - 1)
        if self._slope * MANY <= seconds - table[-1]:
            return MANY
        rows = len(table) - 1 + int((seconds - table[-1]) / self._slope)
        while self.of(rows + 1) <= seconds:  # the division rounds
            rows += 1
        while self.of(rows) > seconds:
            rows -= 1
        return min(rows, MANY)

    def observe(self, rows: int, seconds: float) -> None:
        """Learn from a step: all points move by the same factor, the two next to `rows` a little further."""
        if rows > self._rows[-1]:
            return
        right = int(np.searchsorted(self._rows, rows))
        left = max(0, right - 1)
        span = self._rows[right] - self._rows[left]
        right_weight = (rows - self._rows[left]) / span if span else 1.0
        log_error = math.log(seconds / float(np.interp(rows, self._rows, self._seconds)))
        self._seconds *= math.exp(self._tuning.scale_learns * log_error)
        self._seconds[left] *= math.exp(self._tuning.shape_learns * (1.0 - right_weight) * log_error)
        self._seconds[right] *= math.exp(self._tuning.shape_learns * right_weight * log_error)
        self._tabulate()

    def become(self, rows: int, seconds: float) -> None:
        """Scale the whole function so that a step over `rows` rows takes `seconds`."""
        self._seconds *= seconds / self.of(rows)
        self._tabulate()

    def _tabulate(self) -> None:
        """Compute T_v at every number of rows up to the last measured one: it is needed often in a step."""
        monotone = np.maximum.accumulate(self._seconds)
        last = int(self._rows[-1])
        self._table: list[float] = np.interp(np.arange(last + 1), self._rows, monotone).tolist()
        self._slope = float((monotone[-1] - monotone[-2]) / (self._rows[-1] - self._rows[-2]))


def least_seconds(rows: Sequence[int], seconds: Callable[[int], float], enough: float) -> list[float]:
    """Return the least seconds of a step over each of these row counts, of several rounds; seconds(count) makes a step.

    A large model's start would wait for minutes: beyond the first LONG step, from STEEP_ROWS on, nothing is measured
    but extended along a line.
    """
    least: dict[int, float] = {}
    total = 0.0
    for count in rows:
        tries = [seconds(count)]
        if least and tries[0] > max(LONG, DELAYED * count / max(least) * least[max(least)]):
            tries.append(seconds(count))
        least[count], total = min(tries), total + sum(tries)
        if least[count] > LONG and count >= STEEP_ROWS:
            break
    shortest = list(accumulate(reversed(least.values()), min))[::-1]  # seconds of a step over as many rows or more
    again = [n for n, more in zip(least, shortest, strict=True) if least[n] <= ONCE or least[n] > DELAYED * more]
    for done in range(1, REPEATS):
        if done >= LEAST_ROUNDS and total >= enough:
            break
        for count in again:
            took = seconds(count)
            total, least[count] = total + took, min(least[count], took)
    (one, before), (last, longest) = list(least.items())[-2:]
    slope = max(0.0, longest - before) / (last - one)
    return [least.get(count, longest + slope * (count - last)) for count in rows]


def best_prefill_rows(engine: Engine, slots: int, most: int) -> int:
    """Return the least number of prompt rows, up to `most`, with which a row takes as little time as with any: whoever
    comes waits for the end of a step. Found by running the engine over its first `slots` slots, which no session may
    use yet; `most` if they are too few."""
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


def _timed(engine: Engine, rows: int) -> float:
    packer = engine.packer()
    for row in range(rows):
        keys = _keys(engine, row)
        index = packer.add_row(0, WARM_UP_KEYS, int(keys[-1]))
        packer.add_path(keys, [index])
        packer.want(index)
    return _seconds(engine, packer, rows)


def _keys(engine: Engine, row: int) -> Slots:
    """Return the slots of a text that ends with this row. Texts share what is before it, where they need not lie in
    blocks of their own."""
    if chains_only(engine):
        return BLOCK * row + np.arange(WARM_UP_KEYS + 1)
    return np.append(np.arange(1, 1 + WARM_UP_KEYS), 1 + WARM_UP_KEYS + row)


def _seconds(engine: Engine, packer: Packer, wanted: int) -> float:
    """Run a step and return its seconds; `wanted` is the number of its wanted rows."""
    step = step_of(engine)
    start = time.perf_counter()
    step(packer.pack(), lambda: dict.fromkeys(range(wanted), GREEDY))
    return time.perf_counter() - start
