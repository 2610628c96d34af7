"""Pass times: T_d(n), the seconds of a draft pass over n nodes. As measured at start-up, they set the expansion width;
as measured while serving, with all host work, the choice of nodes that pay.

Expanding one node per pass, the best, computes the fewest nodes. Several per pass give a deeper and wider tree sooner,
since an accelerator's step over a few rows takes about as long as over one. How many nodes a session has in a pass
depends on the device, so it is measured. The number of nodes of all sessions is measured too: if extra rows are cheap,
no session should wait for another's pass.

Within this width, a pass over nodes of path probabilities p_1, ..., p_n yields a path probability of sum(p) / T_d(n) a
second. With

    T_d(n) = base + a_node * n

a further node of probability p raises that rate if p > a_node * sum(p) / T_d(n). A less probable node only delays the
next pass, which has likelier nodes, or the next commit, which decides between nodes. Passes are therefore narrow if
there are many sessions or if nodes are costly, and likely chains grow deep sooner.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from specdec.decoding.candidates import QueriedRow, draft_candidates
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, draft_pass_of
from specdec.engine.kv.slots import Slots

WIDTHS = (4, 8, 16)
"""Widths to try, ascending; the first is allowed however long its step takes."""

MAX_SLOWDOWN_OF_SESSION = 1.25
"""Limit on the time of a step at a larger width, in multiples of a step at the smallest width."""

ROWS = (16, 32, 64, 128, 256)
"""Node counts over all sessions to try, ascending; the first is the fallback and is not measured."""

MAX_SLOWDOWN_OF_ALL = 2.0
"""Limit on the time of a pass over the nodes of all sessions, in multiples of a step at the smallest width.

If a pass over n rows takes a + b n seconds, one pass within this limit finishes nodes earlier, on average, than several
passes over ROWS[0] nodes each.
"""

MAX_LOGITS_BYTES = 64 << 20
"""Limit on the memory of a pass's logits."""

TEXT = 32
"""Text tokens seen by every measured row."""

LONG_TEXT = 256
"""Text tokens seen by every row in passes over several sessions. An engine that pads reads every text at the length
of the longest."""

REPEATS = 10
CROWDED_REPEATS = 3

SAMPLED = SamplingQuery(RequestSampler(Sampling(temperature=1.0)), TEXT)
"""The query of the measurement: it costs more per row than a greedy one."""

DECAY = 0.98
"""Weight of a pass relative to the next one."""

MEASURED_WEIGHT = 4.0
"""Weight of each start-up measurement, in passes. It never decays, since passes of a single size determine no slope."""

MAX_OBSERVED = 3.0
"""Cap on an observed pass, in multiples of its expected seconds: the process may have lost its core meanwhile."""


class Width(NamedTuple):
    """Limits on the nodes of a pass, for one session and for all, and the measured seconds of a pass by node count."""

    of_session: int
    of_all: int
    seconds: Mapping[int, float]


def measured_width(engine: Engine, context: int, branches: int) -> Width:
    """Measure the width: run the engine over its first slots and pick `branches` children of every row. No session may
    hold slots yet. Texts are cut so that one more row fits into the model's context, which must have at least 2
    tokens."""
    short, long = min(TEXT, context - 1), min(LONG_TEXT, context - 1)
    forward = draft_pass_of(engine)

    def choose(packer: Packer) -> None:
        rows = [QueriedRow(row, SAMPLED, engine.vocabulary) for row in range(len(packer.wanted))]
        draft_candidates(forward(packer.pack()), rows, branches)

    def seconds(rows: int) -> float:
        packer = engine.packer()
        siblings(packer, rows, np.arange(1, 1 + short + rows))
        start = time.perf_counter()
        choose(packer)
        return time.perf_counter() - start

    rounds = [[seconds(rows) for rows in WIDTHS] for _ in range(REPEATS)]  # interleaved: a slow spell hits all widths
    of_widths = dict(zip(WIDTHS, map(min, *rounds), strict=True))
    width = widest_of_session(of_widths.__getitem__)

    def crowded(rows: int) -> float:
        """Return the seconds of a pass over `rows` nodes, `width` below each of several texts."""
        packer, texts = engine.packer(), rows // width
        start = time.perf_counter()
        for text in range(texts):
            nodes = np.arange(width) + 1 + long + texts + text * width
            siblings(packer, width, np.concatenate([np.arange(long) + 1 + text, nodes]))
        choose(packer)
        return time.perf_counter() - start

    room = min((engine.capacity - 1 - long) // 2, MAX_LOGITS_BYTES // (4 * engine.vocabulary))
    of_all = widest_of_all(lambda rows: min(crowded(rows) for _ in range(CROWDED_REPEATS)), of_widths[WIDTHS[0]], room)
    return Width(width, of_all, of_widths)


def widest_of_session(seconds: Callable[[int], float]) -> int:
    """Return the largest of WIDTHS within MAX_SLOWDOWN_OF_SESSION; `seconds` maps a width to its step time."""
    limit = MAX_SLOWDOWN_OF_SESSION * seconds(WIDTHS[0])
    return max(width for width in WIDTHS if seconds(width) <= limit)


def widest_of_all(seconds: Callable[[int], float], least_width: float, room: int) -> int:
    """Return the largest of ROWS within MAX_SLOWDOWN_OF_ALL and `room`; a step at the smallest width takes
    `least_width` seconds. The search stops at the first count over the limit."""
    within = itertools.takewhile(
        lambda rows: rows <= room and seconds(rows) <= MAX_SLOWDOWN_OF_ALL * least_width, ROWS[1:]
    )
    return max(within, default=ROWS[0])


def siblings(packer: Packer, rows: int, slots: Slots) -> None:
    """Pack `rows` sibling nodes below one text and request their logits; the text takes the remaining slots."""
    text, places = slots[: len(slots) - rows], slots[len(slots) - rows :].tolist()
    added = [packer.add_row(1 + row, len(text), slot) for row, slot in enumerate(places)]
    packer.add_leaves(text, [[slot] for slot in places], added)
    for row in added:
        packer.want(row)


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
        self._passes.add(nodes, min(seconds, MAX_OBSERVED * self.of(nodes)), 1.0)
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
