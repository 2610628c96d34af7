"""A packed batch: the tokens of many sessions as one forward pass.

What a row may see is said in one of two layouts, each with a packer of its own: *paths* (`paths.py`), a list
of key slots in order of position for every row, read by the CPU's attention; and *lanes*
(`lanes.py`), rectangles of keys and rows with a mask, for engines that attend with tensor operations. A
packer knows nothing about sessions or trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.row_counts import InvariantRowCounts

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class PackedBatch:
    """One forward pass over t tokens."""

    tokens: NDArray[np.int64]  # [t]
    positions: NDArray[np.int64]  # [t] absolute
    slots: Slots  # [t] where each token's key and value are written
    wanted: NDArray[np.int64]  # [n] rows whose logits are wanted; padding repeats the first


@dataclass
class Packer(ABC):
    """Collects rows and what they see, then packs them. Every row belongs to one path or tree.

    `rows` is the class of numbers of rows that the batch is padded to, if any; so are the wanted ones.
    """

    rows: InvariantRowCounts | None = None
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def add_rows(self, tokens: Sequence[int], first_position: int, slots: Sequence[int] | Slots) -> range:
        """Append consecutive tokens of one text; their row indices."""
        start = len(self.tokens)
        self.tokens += tokens
        self.positions += range(first_position, first_position + len(tokens))
        self.slots += slots.tolist() if isinstance(slots, np.ndarray) else slots
        return range(start, len(self.tokens))

    def add_row(self, token: int, position: int, slot: int) -> int:
        self.tokens.append(token)
        self.positions.append(position)
        self.slots.append(slot)
        return len(self.tokens) - 1

    def want(self, row: int) -> int:
        """Ask for a row's logits; the index of its row among the results."""
        self.wanted.append(row)
        return len(self.wanted) - 1

    @abstractmethod
    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        """Rows along one text whose key at index i is its token at position i."""

    @abstractmethod
    def add_tree(self, keys: Slots, key_positions: NDArray[np.int64], rows: Sequence[int], visible: Mask) -> None:
        """Rows that see a subset of keys, one for each position up to their own: `visible`
        [len(rows), len(keys)]."""

    @abstractmethod
    def pack(self) -> PackedBatch:
        """The batch; the packer is used up."""

    def _pad(self) -> None:
        """Add tokens that nobody asked for, up to a member of the class."""
        if self.rows is None:
            return
        missing = self.rows.padded(len(self.tokens)) - len(self.tokens)
        if missing:
            self.add_path(np.asarray([PADDING_SLOT]), [self.add_row(0, 0, PADDING_SLOT) for _ in range(missing)])
        wanted = self.wanted or [0]  # an empty selection is a case of its own to a compiler
        self.wanted = wanted + wanted[:1] * (self.rows.padded(len(wanted)) - len(wanted))
