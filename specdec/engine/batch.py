"""A packed batch: the tokens of many sessions in one forward pass.

A row's keys have one of four layouts, each with its own packer. A *ragged batch* (`cpu/layout.py`) lists every row's
key slots in order of position. A *padded batch* (`padded/layout.py`) pads keys and rows to rectangles with a mask, for
attention by tensor operations. A *split-KV batch* (`gpu/layout.py`) has tiles over parts of the keys. A *block batch*
(`vllm/layout.py`) has a block table for each text. Packers know nothing about sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.row_counts import InvariantRowCounts


@dataclass(frozen=True)
class PackedBatch:
    """A packed batch: one forward pass over t tokens."""

    tokens: NDArray[np.int64]  # [t]
    positions: NDArray[np.int64]  # [t] absolute
    slots: Slots  # [t] destination of each token's key and value
    wanted: NDArray[np.int64]  # [n] rows whose logits are returned; padded by repeating the first


@dataclass
class Packer(ABC):
    """Collects rows and the keys they see, and packs them into a batch. Every row belongs to one path or tree.

    `rows`: invariant row counts, if any, to which the number of all rows and the number of wanted rows are padded.
    """

    rows: InvariantRowCounts | None = None
    tokens: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def add_rows(self, tokens: Sequence[int], first_position: int, slots: Sequence[int] | Slots) -> range:
        """Append consecutive tokens of one text; return their row indices."""
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
        """Request a row's logits; return its index among the results."""
        self.wanted.append(row)
        return len(self.wanted) - 1

    @abstractmethod
    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        """Let these rows see one text, each up to its own position; keys[i] is the slot of the token at position i."""

    def add_branch(self, text: Slots, branch: Sequence[int], rows: Sequence[int]) -> None:
        """Let these rows see a text and then the slots of a branch below it, each up to its own position."""
        self.add_path(np.concatenate([text, branch]), rows)

    def add_leaves(self, text: Slots, branches: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Let each of these rows see a text and then the slots of its own branch, which ends with the row's slot.
        Branches may share a prefix."""
        for branch, row in zip(branches, rows, strict=True):
            self.add_branch(text, branch, [row])

    @abstractmethod
    def pack(self) -> PackedBatch:
        """Return the batch; the packer cannot be used again."""

    def _padded(self) -> tuple[NDArray[np.int64], NDArray[np.int64], Slots, NDArray[np.int64]]:
        """Add padding rows up to an invariant row count, and pad the wanted rows by repeating the first. Return the
        fields of the PackedBatch."""
        if self.rows is not None:
            missing = self.rows.padded(len(self.tokens)) - len(self.tokens)
            if missing:
                self.add_path(np.asarray([PADDING_SLOT]), [self.add_row(0, 0, PADDING_SLOT) for _ in range(missing)])
            wanted = self.wanted or [0]  # a compiler would treat an empty selection as a special case
            self.wanted = wanted + wanted[:1] * (self.rows.padded(len(wanted)) - len(wanted))
        return (
            np.asarray(self.tokens, dtype=np.int64),
            np.asarray(self.positions, dtype=np.int64),
            np.asarray(self.slots, dtype=np.int64),
            np.asarray(self.wanted, dtype=np.int64),
        )
