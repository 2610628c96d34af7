"""Expansion width: the number of nodes of a session that are worth computing together, measured at start.

A draft that computes only the best node before it looks again computes the fewest nodes. One that computes many at once
has a deeper and wider tree sooner, since an accelerator's step over a few rows takes about as long as over
one. So the width is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from draft_service.tree_rows import add_nodes
from specdec.decoding.candidates import draft_candidates
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.tree import Node
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine
from specdec.engine.kv.slots import Slots

WIDTHS = (4, 8, 16)
"""Widths that are tried, ascending; the first is allowed however long its step takes."""

MAX_SLOWDOWN = 1.25
"""Most time that a step over a larger width may take, in multiples of a step over the least width."""

TEXT = 32
"""Number of text tokens that every measured row sees."""

REPEATS = 10

SAMPLED = SamplingQuery(RequestSampler(Sampling(temperature=1.0)), TEXT)
"""The query of the measurement: it costs more per row than a greedy one."""


def measured(engine: Engine, branches: int) -> int:
    """Return the measured width. The measurement runs the engine over its first slots, which no session may have yet,
    and picks `branches` children of every row."""

    def seconds(rows: int) -> float:
        packer = engine.packer()
        siblings(packer, rows, np.arange(1, 1 + TEXT + rows))
        start = time.perf_counter()
        for row in engine.forward(packer.pack()):
            draft_candidates(row, SAMPLED, branches)
        return time.perf_counter() - start

    rounds = [[seconds(rows) for rows in WIDTHS] for _ in range(REPEATS)]  # interleaved: a slow spell hits all alike
    return widest(dict(zip(WIDTHS, map(min, *rounds), strict=True)).__getitem__)


def widest(seconds: Callable[[int], float]) -> int:
    """Return the largest of WIDTHS within MAX_SLOWDOWN; `seconds` gives the time of a step over so many rows."""
    limit = MAX_SLOWDOWN * seconds(WIDTHS[0])
    return max(width for width in WIDTHS if seconds(width) <= limit)


def siblings(packer: Packer, rows: int, slots: Slots) -> None:
    """Pack `rows` sibling nodes below one text and want their logits; the text has the other slots."""
    text, places = slots[: len(slots) - rows], slots[len(slots) - rows :].tolist()
    root = Node(0, len(text) - 1, None, 0.0, 0)
    nodes = [Node(1 + row, len(text), root, 0.0, 0) for row in range(rows)]
    for row in add_nodes(packer, text, dict(zip(nodes, places, strict=True)), nodes):
        packer.want(row)
