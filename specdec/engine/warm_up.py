"""A batch to try an engine with before anybody's text is there."""

from __future__ import annotations

import numpy as np

from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Engine

WARM_UP_KEYS = 32
"""Tokens that each row sees."""


def warm_up_batch(engine: Engine, rows: int) -> PackedBatch:
    """So many rows side by side below one short text, in the engine's first slots, which must be nobody's yet. All are
    wanted."""
    packer = engine.packer()
    context = np.arange(1, 1 + WARM_UP_KEYS)
    for row in range(rows):
        slot = 1 + WARM_UP_KEYS + row
        index = packer.add_row(0, WARM_UP_KEYS, slot)
        packer.add_path(np.append(context, slot), [index])
        packer.want(index)
    return packer.pack()
