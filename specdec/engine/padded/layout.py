"""The padded batch: rectangles of key slots and query rows with a mask, for attention by tensor operations.

A *lane* is a list of key slots and the query rows that read them. A chain of text becomes one lane for each padded
length of its keys. A token tree becomes a chain for each of its paths, with keys in order of absolute position, without
gaps (`add_branch`). The leaves of a draft's tree, whose bits do not matter, become a single lane with a mask
(`add_leaves`).

Exactness depends on two rules: a chain's lane is padded to a length determined only by the positions of its rows, and
to at least MIN_ROWS rows. Then a row's attention is the same in a prompt, a tree or a plain step. Packers with
`group_memory` follow neither rule.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import PADDING_SLOT, Slots

Mask = NDArray[np.bool_]

KEY_BUCKET = 64
"""A lane's list of keys is padded to a multiple of this number."""

MIN_ROWS = 4
"""Minimum number of query rows in a lane, after padding."""


@dataclass(frozen=True)
class Lane:
    """A lane: query rows with the same list of keys."""

    keys: Slots  # [n] slots
    key_positions: NDArray[np.int64]  # [n] absolute positions of the keys
    rows: NDArray[np.int64]  # [r] indices into the batch's tokens
    row_positions: NDArray[np.int64]  # [r]
    visible: Mask | None  # [r, n]; None: a row sees the keys up to its own position
    padded_keys: int  # number of keys, including padding


@dataclass(frozen=True)
class PaddedGroup:
    """A stack of lanes of one shape. Padding keys are masked and use the padding slot; padding rows repeat a lane's
    first row."""

    keys: Slots  # [g, l]
    rows: NDArray[np.int64]  # [g, r]
    visible: Mask  # [g, r, l]
    windowed: Mask | None  # [g, r, l]: `visible` within the sliding window, if any
    contiguous: bool  # one lane whose keys are consecutive slots: a view is enough


@dataclass(frozen=True)
class PaddedBatch(PackedBatch):
    """A padded batch: lanes stacked in groups."""

    groups: list[PaddedGroup]
    place: NDArray[np.int64]  # [t] each token's row among the flattened rows of all groups

    def parts(self) -> Iterator[tuple[Mask, PaddedBatch]]:
        """Yield (mask, batch) for each group: `mask` is true for the whole batch's wanted rows that are in the
        group."""
        for group in self.groups:
            rows, place = np.unique(group.rows, return_index=True)
            wanted = np.isin(self.wanted, rows)
            yield (
                wanted,
                PaddedBatch(
                    tokens=self.tokens[rows],
                    positions=self.positions[rows],
                    slots=self.slots[rows],
                    wanted=np.searchsorted(rows, self.wanted[wanted]),
                    groups=[replace(group, rows=np.searchsorted(rows, group.rows))],
                    place=place,
                ),
            )


class GroupMemory(NamedTuple):
    """A limit on a group's keys, values and scores in one layer, in bytes. A single lane may exceed it."""

    most: int
    key_bytes: int  # keys and values of a position
    pair_bytes: int  # scores of a row and a position

    def holds(self, lanes: int, rows: int, length: int) -> bool:
        """Return whether a group of lanes of this shape is within the limit."""
        return lanes * length * (self.key_bytes + rows * self.pair_bytes) <= self.most


@dataclass
class PaddedPacker(Packer):
    """A packer of padded batches.

    `window` is the model's sliding window in tokens, if any. `group_memory` pads all lanes to one shape, for engines
    that take one group at a time. If the group would exceed this limit, lanes of similar lengths form several groups,
    to be computed in order. `least_rows` below MIN_ROWS trades exactness for speed.
    """

    window: int | None = None
    group_memory: GroupMemory | None = None
    least_rows: int = MIN_ROWS
    lanes: list[Lane] = field(default_factory=list)

    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        by_length = groupby(rows, lambda row: _bucket(self.positions[row] + 1))
        for padded, members in by_length:
            chunk = np.fromiter(members, dtype=np.int64)
            positions = np.asarray([self.positions[row] for row in chunk])
            count = min(padded, len(keys))
            self.lanes.append(Lane(keys[:count], np.arange(count), chunk, positions, None, padded))

    def add_leaves(self, text: Slots, branches: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Add the branches as one tree: a lane that reads shared slots once."""
        base = len(text)
        columns: dict[int, int] = {}  # slot of a branch -> its column among the keys
        visible = np.zeros((len(rows), base + sum(map(len, branches))), dtype=bool)
        visible[:, :base] = True
        positions = list(range(base))
        for seen, branch in zip(visible, branches, strict=True):
            for position, slot in enumerate(branch, base):
                if slot not in columns:
                    columns[slot] = len(positions)
                    positions.append(position)
                seen[columns[slot]] = True
        keys = np.concatenate([text, list(columns)])
        row_positions = np.asarray([self.positions[row] for row in rows])
        visible = visible[:, : len(positions)]
        self.lanes.append(Lane(keys, np.array(positions), np.asarray(rows), row_positions, visible, _bucket(len(keys))))

    def pack(self) -> PaddedBatch:
        rows = self._padded()
        place = np.zeros(len(self.tokens), dtype=np.int64)
        groups: list[PaddedGroup] = []
        offset = 0
        by_shape = self._by_shape() if self.group_memory is None else self._within(self.group_memory)
        for length, width, lanes in by_shape:
            groups.append(self._stack(lanes, length, width))
            for lane in lanes:
                place[lane.rows] = offset + np.arange(len(lane.rows))
                offset += width
        return PaddedBatch(
            *rows,
            groups=groups,
            place=place,
        )

    def _by_shape(self) -> Iterator[tuple[int, int, list[Lane]]]:
        """Yield a group for each shape: its padded numbers of keys and of rows per lane, and its lanes."""
        shapes: dict[tuple[int, int], list[Lane]] = {}
        for lane in self.lanes:
            shapes.setdefault((lane.padded_keys, self._row_class(len(lane.rows))), []).append(lane)
        for (length, width), lanes in shapes.items():
            yield length, width, lanes

    def _within(self, memory: GroupMemory) -> Iterator[tuple[int, int, list[Lane]]]:
        """Yield one group, or several groups that fit the memory, as `_by_shape` does. Shorter lanes come first: a row
        that another lane reads has an earlier position, so its own lane is at most as long."""
        longest, widest = (max(sizes) for sizes in zip(*map(_shape, self.lanes), strict=True))
        if memory.holds(len(self.lanes), widest, longest):
            yield longest, widest, self.lanes
            return
        group: list[Lane] = []
        widest = 0
        for lane in sorted(self.lanes, key=lambda lane: lane.padded_keys):  # lanes of equal length stay in order
            length, width = _shape(lane)
            if group and not memory.holds(len(group) + 1, max(widest, width), length):
                yield group[-1].padded_keys, widest, group
                group, widest = [], 0
            group.append(lane)
            widest = max(widest, width)
        yield group[-1].padded_keys, widest, group

    def _row_class(self, rows: int) -> int:
        """Return the padded row count of a lane: a power of two, so that lanes of similar width form a stack."""
        return max(self.least_rows, 1 << (rows - 1).bit_length())

    def _stack(self, lanes: list[Lane], length: int, width: int) -> PaddedGroup:
        keys = np.full((len(lanes), length), PADDING_SLOT, dtype=np.int64)
        rows = np.zeros((len(lanes), width), dtype=np.int64)
        visible = np.zeros((len(lanes), width, length), dtype=bool)
        windowed = None if self.window is None else np.zeros_like(visible)
        for g, lane in enumerate(lanes):
            n, r = len(lane.keys), len(lane.rows)
            keys[g, :n] = lane.keys
            rows[g, :r] = lane.rows
            rows[g, r:] = lane.rows[0]
            seen = lane.visible
            if seen is None:
                seen = lane.key_positions <= lane.row_positions[:, None]
            visible[g, :r, :n] = seen
            visible[g, r:, 0] = True  # a padding row must see a key to stay finite
            if windowed is not None and self.window is not None:
                near = lane.key_positions > lane.row_positions[:, None] - self.window
                windowed[g, :r, :n] = seen & near
                windowed[g, r:, 0] = True
        contiguous = len(lanes) == 1 and _consecutive(lanes[0].keys)
        return PaddedGroup(keys, rows, visible, windowed, contiguous)


def _shape(lane: Lane) -> tuple[int, int]:
    return lane.padded_keys, len(lane.rows)


def _bucket(length: int) -> int:
    return -(-length // KEY_BUCKET) * KEY_BUCKET


def _consecutive(slots: Slots) -> bool:
    return bool(slots[-1] - slots[0] == len(slots) - 1 and (np.diff(slots) == 1).all())
