"""The ragged batch: every row lists the slots of its keys in order of position.

So a row's attention depends on its own text alone. It depends neither on the batch's other rows, nor on whether the row
belongs to a prompt, a tree or a plain step: nothing is padded, masked or rearranged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import Slots


@dataclass(frozen=True)
class RaggedBatch(PackedBatch):
    """A ragged batch: row r attends to the slots keys[first[r] : first[r] + positions[r] + 1]."""

    keys: Slots  # slots of all paths, concatenated
    first: NDArray[np.int64]  # [t] start of each row's path

    def check(self, capacity: int) -> None:
        """Raise ValueError unless all slots exist: the compiled code does no bounds checks."""
        lowest, highest = min(self.keys.min(), self.slots.min()), max(self.keys.max(), self.slots.max())
        if lowest < 0 or highest >= capacity:
            raise ValueError(f"slots must lie in 0..{capacity - 1}, one is {lowest if lowest < 0 else highest}")


@dataclass
class RaggedPacker(Packer):
    """A packer of ragged batches. Rows of one path share its list of slots."""

    _keys: list[Slots] = field(default_factory=list)
    _length: int = 0
    _first: dict[int, int] = field(default_factory=dict)  # row -> start of its keys

    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        last = max(map(self.positions.__getitem__, rows))
        if last >= len(keys):
            raise ValueError(f"a row at position {last} needs {last + 1} keys, its path has {len(keys)}")
        self._first.update(dict.fromkeys(rows, self._length))
        self._keys.append(keys)
        self._length += len(keys)

    def pack(self) -> RaggedBatch:
        rows = self._padded()
        return RaggedBatch(
            *rows,
            keys=np.concatenate(self._keys),
            first=np.asarray([self._first[row] for row in range(len(self.tokens))], dtype=np.int64),
        )
