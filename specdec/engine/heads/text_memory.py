"""KV memory for heads with attention: one pool for all texts, and the keys that growing trees see."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.gpu.staging import upload
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, KVPool, Slots


class TextMemory:
    """Keys and values of texts, with `positions` rows for all texts together. Several layers are stored side by side,
    like additional KV heads of one layer. Except for the padding slot the memory is uninitialised: a text reads only
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
            self.release()
            self.first = self.end = position
        missing = self.count + count - len(self._slots)
        if missing > 0:
            try:
                self._slots = np.concatenate([self._slots, self._pool.take(-(-missing // BLOCK) * BLOCK)])
            except Exception:
                self.release()
                raise
        begin, self.end = self.end, self.end + count
        return self._slots[begin - self.first : self.end - self.first]

    def last(self, count: int) -> Slots:
        """Return the slots of the last `count` rows, or of all if there are fewer."""
        return self._slots[max(0, self.count - count) : self.count]

    def release(self) -> None:
        """Give back all slots."""
        self._pool.give(self._slots)
        self._slots, self.first, self.end = np.arange(0), 0, 0


class TreeContext:
    """The keys that each row of n growing trees sees: its text's, its ancestors' in the tree, and its own. For each
    level of the trees, call `visible` once, then `add` once."""

    def __init__(self, memory: TextMemory, texts: list[Slots], room: int) -> None:
        """`texts`: the slots of each text; `room`: maximum rows of a tree."""
        length = max(map(len, texts))
        keys, values = memory.gathered(texts, length)
        shape = len(texts), length + room, *keys.shape[2:]
        self._keys, self._values = keys.new_empty(shape), values.new_empty(shape)
        self._keys[:, :length], self._values[:, :length] = keys, values
        lengths = torch.tensor([len(slots) for slots in texts], device=keys.device)
        self._seen = torch.arange(length, device=keys.device) < lengths[:, None]  # [n, length]
        self._lineage = self._seen.new_zeros(len(texts), 1, 0)  # [n, f, rows]: tree rows that the last level's rows see
        self._end = length  # rows of texts and trees so far

    def visible(self, origins: Tensor) -> Tensor:
        """Begin a level whose rows have their parents at `origins` [n, f] in the previous level. Return, for each row
        of the level, which of the k rows so far (this level's included) it sees: bool [n, f, k]."""
        texts, rows = origins.shape
        ancestors = self._lineage[torch.arange(texts, device=origins.device)[:, None], origins]
        own = torch.eye(rows, dtype=torch.bool, device=origins.device).expand(texts, -1, -1)
        self._lineage = torch.cat([ancestors, own], dim=2)
        return torch.cat([self._seen[:, None].expand(-1, rows, -1), self._lineage], dim=2)

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add a level's keys and values [n, f, kv_heads, width]; return those of all rows so far [n, k, kv_heads,
        width]."""
        begin, self._end = self._end, self._end + keys.shape[1]
        self._keys[:, begin : self._end], self._values[:, begin : self._end] = keys, values
        return self._keys[:, : self._end], self._values[:, : self._end]
