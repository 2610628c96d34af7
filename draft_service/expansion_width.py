"""Expansion width: the number of nodes that are worth computing together, of a session and of all, measured at start.

A draft that computes only the best node before it looks again computes the fewest nodes. One that computes many at once
has a deeper and wider tree sooner, since an accelerator's step over a few rows takes about as long as over
one. So the width is measured. So is how many nodes of all sessions a pass takes: where more rows cost little, nobody
should wait for others' passes.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from specdec.decoding.candidates import AskedRow, draft_candidates
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine, draft_pass_of
from specdec.engine.kv.slots import Slots

WIDTHS = (4, 8, 16)
"""Widths that are tried, ascending; the first is allowed however long its step takes."""

MAX_SLOWDOWN = 1.25
"""Most time that a step over a larger width may take, in multiples of a step over the least width."""

ROWS = (16, 32, 64, 128, 256)
"""Numbers of nodes of all sessions that are tried, ascending; the first needs no measurement."""

MAX_CROWDED = 2.0
"""Most time that a pass over the nodes of all sessions may take, in multiples of a step over the least width. If passes
over n rows take a + b n seconds, its nodes are done sooner on average than in passes over the first of ROWS."""

MAX_LOGITS_BYTES = 64 << 20
"""Most memory of a pass's logits."""

TEXT = 32
"""Number of text tokens that every measured row sees."""

LONG_TEXT = 256
"""Text tokens that each row sees in passes over several sessions. Engines that pad read every text at the length of the
longest."""

REPEATS = 10
CROWDED_REPEATS = 3

SAMPLED = SamplingQuery(RequestSampler(Sampling(temperature=1.0)), TEXT)
"""The query of the measurement: it costs more per row than a greedy one."""


class Width(NamedTuple):
    """Nodes that a pass computes at most."""

    of_session: int
    of_all: int


def measured(engine: Engine, branches: int) -> Width:
    """Return the measured width. The measurement runs the engine over its first slots, which no session may have yet,
    and picks `branches` children of every row."""

    forward = draft_pass_of(engine)

    def choose(packer: Packer) -> None:
        rows = [AskedRow(row, SAMPLED, engine.vocabulary) for row in range(len(packer.wanted))]
        draft_candidates(forward(packer.pack()), rows, branches)

    def seconds(rows: int) -> float:
        packer = engine.packer()
        siblings(packer, rows, np.arange(1, 1 + TEXT + rows))
        start = time.perf_counter()
        choose(packer)
        return time.perf_counter() - start

    rounds = [[seconds(rows) for rows in WIDTHS] for _ in range(REPEATS)]  # interleaved: a slow spell hits all alike
    of_widths = dict(zip(WIDTHS, map(min, *rounds), strict=True))
    width = widest(of_widths.__getitem__)

    def crowded(rows: int) -> float:
        """Return the seconds of a pass over `rows` nodes, `width` below each of several texts."""
        packer, texts = engine.packer(), rows // width
        start = time.perf_counter()
        for text in range(texts):
            nodes = np.arange(width) + 1 + LONG_TEXT + texts + text * width
            siblings(packer, width, np.concatenate([np.arange(LONG_TEXT) + 1 + text, nodes]))
        choose(packer)
        return time.perf_counter() - start

    room = min((engine.capacity - 1 - LONG_TEXT) // 2, MAX_LOGITS_BYTES // (4 * engine.vocabulary))
    of_all = most(lambda rows: min(crowded(rows) for _ in range(CROWDED_REPEATS)), of_widths[WIDTHS[0]], room)
    return Width(width, of_all)


def widest(seconds: Callable[[int], float]) -> int:
    """Return the largest of WIDTHS within MAX_SLOWDOWN; `seconds` gives the time of a step over so many rows."""
    limit = MAX_SLOWDOWN * seconds(WIDTHS[0])
    return max(width for width in WIDTHS if seconds(width) <= limit)


def most(seconds: Callable[[int], float], least_width: float, room: int) -> int:
    """Return the largest of ROWS within MAX_CROWDED and `room`, where a step over the least width takes `least_width`
    seconds. The first that takes longer is the last that is tried."""
    within = itertools.takewhile(lambda rows: rows <= room and seconds(rows) <= MAX_CROWDED * least_width, ROWS[1:])
    return max(within, default=ROWS[0])


def siblings(packer: Packer, rows: int, slots: Slots) -> None:
    """Pack `rows` sibling nodes below one text and want their logits; the text has the other slots."""
    text, places = slots[: len(slots) - rows], slots[len(slots) - rows :].tolist()
    added = [packer.add_row(1 + row, len(text), slot) for row, slot in enumerate(places)]
    packer.add_leaves(text, [[slot] for slot in places], added)
    for row in added:
        packer.want(row)
