"""A test, after a forward pass has failed, of whether the engine still computes."""

from __future__ import annotations

import numpy as np
import structlog

from specdec.decoding.processing import MAX_ABS_LOGIT
from specdec.engine.engine import Engine
from specdec.engine.kv.slots import PADDING_SLOT, Slots

log = structlog.get_logger()


def recovers(engine: Engine, written: Slots) -> bool:
    """Overwrite the slots that a failed forward pass may have `written`, and return whether a pass over a single token
    succeeds. A NaN in those slots would spread to the rows that read them, masked or not."""
    try:
        engine.copy(np.full(len(written), PADDING_SLOT), written)
        packer = engine.packer()
        row = packer.add_row(0, 0, PADDING_SLOT)
        packer.add_path(np.array([PADDING_SLOT]), [row])
        packer.want(row)
        logits = engine.forward(packer.pack())
    except Exception as error:
        log.error("engine_fails", exc_info=error)
        return False
    return bool(abs(logits.max()) < MAX_ABS_LOGIT)
