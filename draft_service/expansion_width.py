"""Expansion width: how many nodes to compute in one pass, per session and over all sessions, measured at start-up.

Expanding one node per pass, the best, computes the fewest nodes. Several per pass give a deeper and wider tree sooner,
since an accelerator's step over a few rows takes about as long as over one. The best width depends on the device, so it
is measured. The number of nodes of all sessions in a pass is measured too: if extra rows are cheap, no session should
wait for another's pass.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from specdec.decoding.candidates import AskedRow, draft_candidates
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, draft_pass_of
from specdec.engine.kv.slots import Slots

WIDTHS = (4, 8, 16)
"""Widths to try, ascending; the first is allowed however long its step takes."""

MAX_SLOWDOWN = 1.25
"""Limit on the time of a step at a larger width, in multiples of a step at the smallest width."""

ROWS = (16, 32, 64, 128, 256)
"""Node counts over all sessions to try, ascending; the first is the fallback and is not measured."""

MAX_CROWDED = 2.0
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


class Width(NamedTuple):
    """Limits on the nodes of a pass, for one session and for all, and the measured seconds of a pass by node count."""

    of_session: int
    of_all: int
    seconds: Mapping[int, float]


def measured(engine: Engine, context: int, branches: int) -> Width:
    """Measure the width: run the engine over its first slots and pick `branches` children of every row. No session may
    hold slots yet. Texts are cut so that one more row fits into the model's context, which must have at least 2
    tokens."""
    short, long = min(TEXT, context - 1), min(LONG_TEXT, context - 1)
    forward = draft_pass_of(engine)

    def choose(packer: Packer) -> None:
        rows = [AskedRow(row, SAMPLED, engine.vocabulary) for row in range(len(packer.wanted))]
        draft_candidates(forward(packer.pack()), rows, branches)

    def seconds(rows: int) -> float:
        packer = engine.packer()
        siblings(packer, rows, np.arange(1, 1 + short + rows))
        start = time.perf_counter()
        choose(packer)
        return time.perf_counter() - start

    rounds = [[seconds(rows) for rows in WIDTHS] for _ in range(REPEATS)]  # interleaved: a slow spell hits all widths
    of_widths = dict(zip(WIDTHS, map(min, *rounds), strict=True))
    width = widest(of_widths.__getitem__)

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
    of_all = most(lambda rows: min(crowded(rows) for _ in range(CROWDED_REPEATS)), of_widths[WIDTHS[0]], room)
    return Width(width, of_all, of_widths)


def widest(seconds: Callable[[int], float]) -> int:
    """Return the largest of WIDTHS within MAX_SLOWDOWN; `seconds` maps a width to its step time."""
    limit = MAX_SLOWDOWN * seconds(WIDTHS[0])
    return max(width for width in WIDTHS if seconds(width) <= limit)


def most(seconds: Callable[[int], float], least_width: float, room: int) -> int:
    """Return the largest of ROWS within MAX_CROWDED and `room`; a step at the smallest width takes `least_width`
    seconds. The search stops at the first count over the limit."""
    within = itertools.takewhile(lambda rows: rows <= room and seconds(rows) <= MAX_CROWDED * least_width, ROWS[1:])
    return max(within, default=ROWS[0])


def siblings(packer: Packer, rows: int, slots: Slots) -> None:
    """Pack `rows` sibling nodes below one text and request their logits; the text takes the remaining slots."""
    text, places = slots[: len(slots) - rows], slots[len(slots) - rows :].tolist()
    added = [packer.add_row(1 + row, len(text), slot) for row, slot in enumerate(places)]
    packer.add_leaves(text, [[slot] for slot in places], added)
    for row in added:
        packer.want(row)
