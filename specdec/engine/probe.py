"""A test of an engine after a failed forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import structlog

from specdec.decoding.processing import MAX_ABS_LOGIT
from specdec.engine.engine import Engine
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.model_file import in_one_line
from specdec.engine.shortage import is_shortage

log = structlog.get_logger()


class EngineProbe:
    """Decides whether an engine works again after a failed forward pass."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._written: Slots = np.arange(0)

    def pass_failed(self, written: Sequence[int] | Slots) -> None:
        """Record the slots possibly written by a failed pass."""
        self._written = np.asarray(written, dtype=np.int64)

    def sessions_ended(self) -> None:
        """Record that no session holds KV memory any more. The next `recovers` overwrites whole blocks, because some
        attention kernels mix the tokens of a block in memory, so that single tokens cannot be cleared."""
        blocks = np.unique(self._written // BLOCK)
        slots = (blocks[:, None] * BLOCK + np.arange(BLOCK)).ravel()
        self._written = slots[slots < self._engine.capacity]

    def recovers(self) -> bool:
        """Return whether a pass over a single token succeeds; if so, overwrite the slots of the failed pass. A NaN in
        those slots would spread to the rows that read them, masked or not."""
        engine = self._engine
        try:
            packer = engine.packer()
            row = packer.add_row(0, 0, PADDING_SLOT)
            packer.add_path(np.array([PADDING_SLOT]), [row])
            packer.want(row)
            logits = engine.forward(packer.pack())
            if not abs(logits.max()) < MAX_ABS_LOGIT:
                return False
            engine.copy(np.full(len(self._written), PADDING_SLOT), self._written)  # from the slot just computed
        except Exception as error:
            if is_shortage(error):
                log.error("engine_fails", error=in_one_line(error))
            else:
                log.error("engine_fails", exc_info=error)
            return False
        self._written = np.arange(0)
        return True
