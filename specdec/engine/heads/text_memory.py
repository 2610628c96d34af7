"""KV memory for heads that have attention of their own: one pool for all texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.gpu.staging import upload
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, KVPool, Slots


class TextMemory:
    """Keys and values of texts, for `positions` rows of all texts together: of one layer of heads, or of several layers
    side by side, like more heads of one. Except for the padding slot the memory is uninitialised: a text reads only
    rows that it has written."""

    def __init__(self, positions: int, kv_heads: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.pool = KVPool(positions + 1)  # the first slot is for padding
        self._keys, self._values = (
            torch.empty(positions + 1, kv_heads, width, dtype=dtype, device=device) for _ in range(2)
        )
        self._keys[PADDING_SLOT], self._values[PADDING_SLOT] = 0, 0
        self.row_bytes = 2 * kv_heads * width * dtype.itemsize

    def write(self, slots: Slots, keys: Tensor, values: Tensor) -> None:
        """Write keys and values [n, kv_heads, width] to slots [n]."""
        rows = upload(slots, self._keys.device)
        self._keys.index_copy_(0, rows, keys)
        self._values.index_copy_(0, rows, values)

    def gathered(self, texts: Sequence[Slots], length: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of texts [n, length, kv_heads, width], padded with zeros."""
        rows = np.full((len(texts), length), PADDING_SLOT)
        for row, slots in zip(rows, texts, strict=True):
            row[: len(slots)] = slots
        places = upload(rows.reshape(-1), self._keys.device)
        keys, values = (pool.index_select(0, places) for pool in (self._keys, self._values))
        return keys.view(*rows.shape, *keys.shape[1:]), values.view(*rows.shape, *values.shape[1:])


class TextSlots:
    """The slots of one text's rows, at contiguous positions starting at `first`."""

    def __init__(self, memory: TextMemory) -> None:
        self.first = self.end = 0  # positions
        self._pool = memory.pool
        self._slots: Slots = np.arange(0)

    @property
    def count(self) -> int:
        """The number of rows."""
        return self.end - self.first

    def take(self, position: int, count: int) -> Slots:
        """Return the slots of `count` new rows starting at `position`. If that is not the next position, the earlier
        rows are released first: attention cannot skip a gap. PoolFullError, with all slots released, if there is too
        little memory."""
        if position != self.end:
            self.give_back()
            self.first = self.end = position
        missing = self.count + count - len(self._slots)
        if missing > 0:
            try:
                self._slots = np.concatenate([self._slots, self._pool.take(-(-missing // BLOCK) * BLOCK)])
            except Exception:
                self.give_back()
                raise
        begin, self.end = self.end, self.end + count
        return self._slots[begin - self.first : self.end - self.first]

    def last(self, count: int) -> Slots:
        """Return the slots of the last `count` rows, or of all if there are fewer."""
        return self._slots[max(0, self.count - count) : self.count]

    def give_back(self) -> None:
        """Give back all slots."""
        self._pool.give(self._slots)
        self._slots, self.first, self.end = np.arange(0), 0, 0
