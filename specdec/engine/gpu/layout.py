"""The unit layout: what rows read, cut along positions, for attention on a GPU.

Every text is cut into *splits* at the same absolute positions, SPLIT tokens each. A *unit* is one split of a text and
up to `tile_rows` rows that read it: what one group of threads computes with the heads of one key head. A chain, a tree,
a piece of a prompt and padding are all of this one kind. Where paths agree on a whole split (leaves of a tree in what
comes before them, sessions that share a prefix), its units serve the rows of all of them, so that what they share is
read once.

A row's attention is the sum over its splits in order of position, and that over the tiles of a split, in a matrix
product of TILE_ROWS rows whatever it holds: none of this depends on which rows share its units. Then a row has the same
bits in a prompt, a tree or a plain step, and in any company.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import Mask, PackedBatch, Packer
from specdec.engine.kv.slots import PADDING_SLOT, Slots

SPLIT = 256
"""Positions of a unit."""

TILE_ROWS = 64
"""Rows of the products of a unit: its rows, times the query heads that share a key head."""

LEAST_UNITS = 8
"""Numbers of units are padded to powers of two from here, for each of which a CUDA graph may be kept."""

Integers = NDArray[np.int32]


def tile_rows_for(shared: int) -> int:
    """How many rows a unit has room for, where so many query heads share a key head."""
    return max(1, TILE_ROWS // shared)


@dataclass(frozen=True)
class SplitKvBatch(PackedBatch):
    """Unit u is split unit_splits[u] of a text, whose slots are unit_keys[u], for the rows
    unit_rows[u, : unit_counts[u]]. Units without rows are padding.

    What row r finds in split s is number first_partials[r] + s of `partials`.
    """

    tile_counts: Integers  # [u] rows
    tile_splits: Integers  # [u]
    tile_row_indices: Integers  # [u, places]
    tile_keys: Integers  # [u, SPLIT]; NOWHERE behind the end of the text
    first_partials: Integers  # [t]
    partials: int

    def check(self, capacity: int, context: int) -> None:
        """ValueError unless every slot and position exists: what reads them looks at nothing twice."""
        _check_range("slots", (self.tile_keys, self.slots), capacity)
        _check_range("positions", (self.positions,), context)


class _Path(NamedTuple):
    keys: Slots
    rows: list[int]
    shared: int = 0  # leading splits whose keys are those of the path before it


class _Stack(NamedTuple):
    """Units of the same rows, in consecutive splits of one text."""

    keys: Slots
    splits: range
    rows: list[int]


@dataclass
class SplitKvPacker(Packer):
    """`tile_rows` is the number of rows that a unit has room for (`tile_rows_for`)."""

    tile_rows: int = TILE_ROWS
    _paths: list[_Path] = field(default_factory=list)

    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        last = max(self.positions[row] for row in rows)
        if last >= len(keys):
            raise ValueError(f"a row at position {last} has only {len(keys)} keys")
        self._paths.append(_Path(keys, list(rows)))

    def add_tree(self, keys: Slots, key_positions: NDArray[np.int64], rows: Sequence[int], visible: Mask) -> None:
        for row, seen in zip(rows, visible, strict=True):
            order = np.argsort(key_positions[seen], kind="stable")
            self.add_path(keys[seen][order], [row])

    def pack(self) -> SplitKvBatch:
        self._pad()
        count = len(self.tokens)
        placed = np.bincount([row for path in self._paths for row in path.rows], minlength=count)
        if not (placed == 1).all():
            row = int((placed != 1).argmax())
            raise ValueError(f"row {row} is on {placed[row]} paths, it must be on one")
        stacks = list(self._stacks())
        heights = np.asarray([len(stack.splits) for stack in stacks])
        tiles = int(heights.sum())
        padded = max(LEAST_UNITS, 1 << (tiles - 1).bit_length())
        rows = np.zeros((len(stacks), self.tile_rows), dtype=np.int32)
        keys = np.empty(padded * SPLIT, dtype=np.int32)
        bottom = 0
        for index, stack in enumerate(stacks):
            rows[index, : len(stack.rows)] = stack.rows
            own = stack.keys[stack.splits.start * SPLIT : stack.splits.stop * SPLIT]
            keys[bottom * SPLIT : bottom * SPLIT + len(own)] = own
            bottom, behind = bottom + len(stack.splits), bottom * SPLIT + len(own)
            keys[behind : bottom * SPLIT] = PADDING_SLOT
        keys[tiles * SPLIT :] = PADDING_SLOT
        below = np.cumsum(heights) - heights
        firsts = np.asarray([stack.splits.start for stack in stacks])
        positions = np.asarray(self.positions, dtype=np.int64)
        seen = positions // SPLIT + 1
        return SplitKvBatch(
            tokens=np.asarray(self.tokens, dtype=np.int64),
            positions=positions,
            slots=np.asarray(self.slots, dtype=np.int64),
            wanted=np.asarray(self.wanted, dtype=np.int64),
            tile_counts=_padded(np.repeat([len(stack.rows) for stack in stacks], heights), padded),
            tile_splits=_padded(np.arange(tiles) - np.repeat(below - firsts, heights), padded),
            tile_row_indices=_padded(np.repeat(rows, heights, axis=0), padded),
            tile_keys=keys.reshape(padded, SPLIT),
            first_partials=(np.cumsum(seen) - seen).astype(np.int32),
            partials=int(seen.sum()),
        )

    def _stacks(self) -> Iterator[_Stack]:
        """All units. Neighbours are compared: texts that begin with the same slot are made such, leaves of one session
        are by themselves."""
        paths = sorted(self._paths, key=lambda path: int(path.keys[0]))
        paths[1:] = [b._replace(shared=_common_splits(a.keys, b.keys)) for a, b in pairwise(paths)]
        waiting = [(0, paths)]  # paths that agree on all splits before this one
        while waiting:
            start, group = waiting.pop()
            rows = [row for path in group for row in path.rows]
            stop = max(self.positions[row] for row in rows) // SPLIT + 1
            if len(group) > 1:
                stop = min(path.shared for path in group[1:])
                cuts = [i for i, path in enumerate(group) if i == 0 or path.shared == stop]
                waiting += [(stop, group[a:b]) for a, b in zip(cuts, [*cuts[1:], len(group)], strict=True)]
            if start < stop:
                yield from self._of_rows(group[0].keys, rows, start, stop)

    def _of_rows(self, keys: Slots, rows: list[int], start: int, stop: int) -> Iterator[_Stack]:
        """Units of the splits of one text; a row is in none that begins behind it."""
        ends = [min(self.positions[row] // SPLIT + 1, stop) for row in rows]
        for end in sorted(set(ends)):
            if end <= start:
                continue
            reading = [row for row, last in zip(rows, ends, strict=True) if last >= end]
            for first in range(0, len(reading), self.tile_rows):
                yield _Stack(keys, range(start, end), reading[first : first + self.tile_rows])
            start = end


def _check_range(what: str, arrays: Sequence[NDArray[np.integer]], end: int) -> None:
    lowest, highest = min(int(array.min()) for array in arrays), max(int(array.max()) for array in arrays)
    if lowest < 0 or highest >= end:
        raise ValueError(f"{what} must lie in 0..{end - 1}, one is {lowest if lowest < 0 else highest}")


def _common_splits(a: Slots, b: Slots) -> int:
    """How many leading splits are the same in both."""
    if a[0] != b[0]:  # as strangers do: the rest need not be looked at
        return 0
    whole = min(len(a), len(b)) // SPLIT * SPLIT
    differ = np.flatnonzero(a[:whole] != b[:whole])
    return (int(differ[0]) if len(differ) else whole) // SPLIT


def _padded(array: NDArray[np.int64] | Integers, length: int) -> Integers:
    """With zeros."""
    result = np.zeros((length, *array.shape[1:]), dtype=np.int32)
    result[: len(array)] = array
    return result
