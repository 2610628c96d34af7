"""How many nodes of a session are worth reading together.

Whoever reads the best node first and looks again reads the fewest; whoever reads many at once has the deeper and
broader tree in time, since a step over a few rows takes an accelerator about as long as one over one. So it is
measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from specdec.decoding.choice import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import Packer
from specdec.engine.engine import Engine
from specdec.engine.kv.slots import Slots

WIDTHS = (4, 8, 16)
"""The first is taken however long it takes."""

MAX_SLOWDOWN = 1.25
"""Times as long as over the least breadth: so much may a step over more take."""

TEXT = 32
"""Tokens that every row sees."""

REPEATS = 10

SAMPLED = RequestSampler(Sampling(temperature=1.0))
"""Asks more of a row than one that is greedy."""


def measured(engine: Engine, branches: int) -> int:
    """Run the engine over its first slots, which must be nobody's yet, and pick so many children of every row."""

    def seconds(rows: int) -> float:
        packer = engine.packer()
        siblings(packer, rows, np.arange(1, 1 + TEXT + rows))
        start = time.perf_counter()
        for row in engine.forward(packer.pack()):
            SAMPLED.draft_candidates(row, TEXT, None, (), branches)
        return time.perf_counter() - start

    rounds = [[seconds(rows) for rows in WIDTHS] for _ in range(REPEATS)]  # a slow spell falls on all alike
    return widest(dict(zip(WIDTHS, map(min, *rounds), strict=True)).__getitem__)


def widest(seconds: Callable[[int], float]) -> int:
    """Of the BREADTHS, when a step over so many rows takes so many seconds."""
    limit = MAX_SLOWDOWN * seconds(WIDTHS[0])
    return max(width for width in WIDTHS if seconds(width) <= limit)


def siblings(packer: Packer, rows: int, slots: Slots) -> None:
    """Pack so many nodes below one text, which has the slots that they leave; all of them are wanted."""
    text = len(slots) - rows
    nodes = [packer.add_row(1 + row, text, int(slots[text + row])) for row in range(rows)]
    visible = np.concatenate([np.ones((rows, text), dtype=bool), np.eye(rows, dtype=bool)], axis=1)
    packer.add_tree(slots, np.asarray([*range(text), *[text] * rows]), nodes, visible)
    for node in nodes:
        packer.want(node)
