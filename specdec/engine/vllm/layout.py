"""The block batch: sequences with block tables into the KV cache, the input of paged attention.

A *sequence* is a piece of one text: its rows are consecutive tokens at the end of the computed text, and its block
table locates the keys of all tokens up to that end. So the candidates of a text are a single chain after its root: a
side branch would need its own table, and copies of keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import Slots


@dataclass(frozen=True)
class BlockBatch(PackedBatch):
    """A block batch: sequence s has the batch's rows starts[s] .. starts[s + 1] - 1, from a text of lengths[s] tokens
    so far, with keys in the blocks tables[s]. Sequences are sorted by ascending row count, as some kernels require."""

    starts: NDArray[np.int32]  # [s + 1]
    lengths: NDArray[np.int32]  # [s] tokens, including the rows
    tables: NDArray[np.int32]  # [s, w] blocks in order of position; zero-padded


class _Sequence(NamedTuple):
    rows: range
    length: int
    table: NDArray[np.int32]


@dataclass
class BlockPacker(Packer):
    """A packer of block batches."""

    _sequences: list[_Sequence] = field(default_factory=list)

    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        """Let these rows see the keys of one text, as in `Packer`. Raises ValueError unless the rows are adjacent and
        hold consecutive tokens of the text, and the text's tokens lie in order in its blocks."""
        first, count = rows[0], len(rows)
        position = self.positions[first]
        length = position + count
        own = range(first, first + count)
        if list(rows) != list(own) or self.positions[first : first + count] != list(range(position, length)):
            raise ValueError("the rows of a sequence must be consecutive tokens, next to each other")
        if length > len(keys):
            raise ValueError(f"a row at position {length - 1} needs {length} keys, its path has {len(keys)}")
        table = (keys[:length:BLOCK] // BLOCK).astype(np.int32)
        if count == 1:  # the common case: runs for every text in every step
            if not self.slots[first] == keys[position] == int(table[-1]) * BLOCK + position % BLOCK:
                raise ValueError("the tokens of a sequence must lie in its blocks, in order of position")
            self._sequences.append(_Sequence(own, length, table))
            return
        places = np.arange(position, length)
        written = table[places // BLOCK].astype(np.int64) * BLOCK + places % BLOCK
        if self.slots[first : first + count] != written.tolist() or not np.array_equal(keys[position:length], written):
            raise ValueError("the tokens of a sequence must lie in its blocks, in order of position")
        self._sequences.append(_Sequence(own, length, table))

    def pack(self) -> BlockBatch:
        tokens, positions, slots, wanted = self._padded()
        sequences = sorted(self._sequences, key=lambda sequence: len(sequence.rows))
        order = np.fromiter(chain.from_iterable(sequence.rows for sequence in sequences), dtype=np.int64)
        if len(order) != len(tokens) or len(np.unique(order)) != len(order):
            raise ValueError("every row must be in one sequence")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order))
        counts = [len(sequence.rows) for sequence in sequences]
        tables = np.zeros((len(sequences), max(len(sequence.table) for sequence in sequences)), dtype=np.int32)
        for line, sequence in zip(tables, sequences, strict=True):
            line[: len(sequence.table)] = sequence.table
        return BlockBatch(
            tokens[order],
            positions[order],
            slots[order],
            place[wanted],
            starts=np.asarray([0, *accumulate(counts)], dtype=np.int32),
            lengths=np.asarray([sequence.length for sequence in sequences], dtype=np.int32),
            tables=tables,
        )
