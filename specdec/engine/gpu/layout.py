"""The split-KV batch: the rows' keys, cut along positions into tiles, for attention on a GPU.

Every text is cut into *splits* at the same absolute positions, SPLIT tokens each. A *split-KV tile* is one split of a
text and up to `tile_rows` rows that read it: the work of one program for the query heads of one key head. Chains,
trees, pieces of a prompt and padding all become tiles of this kind. If paths share a whole split (leaves of one tree,
sessions with a common prefix), its tiles serve the rows of all these paths, and the shared keys are read once.

A row's attention is a sum over its splits in order of position. Within a split, the sum runs over the keys in order, a
few at a time, by a matrix product of at least TILE_ROWS rows, some possibly unused. None of this depends on the other
rows of the tiles, so a row has the same bits in a prompt, a tree or a plain step, beside any other rows.

A row has one result per split, a *partial*. Partials stay in memory until they are summed. If a batch has more of them
than fit, its attention runs in several *waves* of rows, each with its own tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.partials import MAX_PARTIALS, SPLIT, WAVE_ROWS

TILE_ROWS = 64
"""Rows of a split-KV tile's matrix products: the tile's rows times the query heads per key head."""

MIN_TILES = 8
"""Tiles of the smallest batch. Larger tile counts are padded to a power of two, because each count may have its own
CUDA graph."""

Integers = NDArray[np.int32]


def tile_rows_for(shared: int) -> int:
    """Return a tile's capacity in rows, with `shared` query heads per key head."""
    return max(1, TILE_ROWS // shared)


class Wave(NamedTuple):
    """Rows whose partials are in memory at the same time, and the tiles of these rows."""

    rows: slice
    tiles: slice


@dataclass(frozen=True)
class SplitKvBatch(PackedBatch):
    """A split-KV batch. Tile u is split number tile_splits[u] of a text, with the slots tile_keys[u], read by the rows
    tile_row_indices[u, : tile_counts[u]]. Tiles without rows are padding.

    The partial of row r over split s has the number first_partials[r] + s among the `partials` of its wave.
    """

    tile_counts: Integers  # [u] number of rows
    tile_splits: Integers  # [u]
    tile_row_indices: Integers  # [u, tile_rows] row indices
    tile_keys: Integers  # [u, SPLIT]; the padding slot beyond the end of the text
    first_partials: Integers  # [t]
    partials: int  # in the largest wave
    waves: tuple[Wave, ...]

    def check(self, capacity: int, context: int) -> None:
        """Raise ValueError unless all slots and positions exist: the kernels do no bounds checks."""
        _check_range("slots", (self.tile_keys, self.slots), capacity)
        _check_range("positions", (self.positions,), context)


class _Keys(NamedTuple):
    """The key slots of a path in two parts: branches below one text share its whole splits and copy only its end."""

    text: Slots  # whole splits
    rest: Slots

    def of(self, splits: range) -> Iterator[Slots]:
        """Yield the slots of these splits, in two parts."""
        begin, end, whole = splits.start * SPLIT, splits.stop * SPLIT, len(self.text)
        yield self.text[begin:end]
        yield self.rest[max(0, begin - whole) : max(0, end - whole)]


class _Path(NamedTuple):
    first: int  # first slot of its keys
    keys: _Keys
    rows: list[int]
    shared: int = 0  # leading splits with the same keys as the preceding path


class _Stack(NamedTuple):
    """Tiles of the same rows over consecutive splits of one text."""

    keys: _Keys
    splits: range
    rows: list[int]


class _Tiles(NamedTuple):
    """The arrays of a wave's tiles, as in `SplitKvBatch`."""

    counts: Integers
    splits: Integers
    row_indices: Integers
    keys: Integers


@dataclass
class SplitKvPacker(Packer):
    """A packer of split-KV batches. `tile_rows` is a tile's capacity in rows (`tile_rows_for`); `most_partials` limits
    the partials of a wave, but not below those of WAVE_ROWS rows."""

    tile_rows: int = TILE_ROWS
    most_partials: int = MAX_PARTIALS
    _paths: list[_Path] = field(default_factory=list)
    _text: Slots | None = None  # of the last branch
    _whole: Slots = field(default_factory=lambda: np.empty(0, dtype=np.int64))  # its whole splits

    def add_path(self, keys: Slots, rows: Sequence[int]) -> None:
        whole = len(keys) // SPLIT * SPLIT
        self._add(_Keys(keys[:whole], keys[whole:]), rows)

    def add_branch(self, text: Slots, branch: Sequence[int], rows: Sequence[int]) -> None:
        if text is not self._text:
            self._text, self._whole = text, text[: len(text) // SPLIT * SPLIT]
        self._add(_Keys(self._whole, np.concatenate([text[len(self._whole) :], branch])), rows)

    def _add(self, keys: _Keys, rows: Sequence[int]) -> None:
        last, count = max(map(self.positions.__getitem__, rows)), len(keys.text) + len(keys.rest)
        if last >= count:
            raise ValueError(f"a row at position {last} needs {last + 1} keys, its path has {count}")
        self._paths.append(_Path(int(keys.text[0] if len(keys.text) else keys.rest[0]), keys, list(rows)))

    def pack(self) -> SplitKvBatch:
        tokens, positions, slots, wanted = self._padded()
        count = len(tokens)
        placed = np.bincount([row for path in self._paths for row in path.rows], minlength=count)
        if not (placed == 1).all():
            row = int((placed != 1).argmax())
            raise ValueError(f"row {row} is on {placed[row]} paths, must be on one")
        seen = positions // SPLIT + 1
        first_partials = np.zeros(count, dtype=np.int32)
        partials, tiles, waves = 0, list[_Tiles](), list[Wave]()
        for rows in self._waves(seen):
            ends = np.cumsum(seen[rows])
            first_partials[rows] = ends - seen[rows]
            partials = max(partials, int(ends[-1]))
            first = waves[-1].tiles.stop if waves else 0
            tiles.append(self._tiles(list(self._stacks(self._paths_of(rows)))))
            waves.append(Wave(rows, slice(first, first + len(tiles[-1].counts))))
        of_all = tiles[0] if len(tiles) == 1 else _Tiles(*map(np.concatenate, zip(*tiles, strict=True)))
        return SplitKvBatch(
            tokens,
            positions,
            slots,
            wanted,
            tile_counts=of_all.counts,
            tile_splits=of_all.splits,
            tile_row_indices=of_all.row_indices,
            tile_keys=of_all.keys,
            first_partials=first_partials,
            partials=partials,
            waves=tuple(waves),
        )

    def _waves(self, seen: NDArray[np.int64]) -> Iterator[slice]:
        """Yield consecutive rows for each wave, as many as fit. `seen`: the partials of each row."""
        ends, start = np.cumsum(seen), 0
        while start < len(seen):
            before = int(ends[start - 1]) if start else 0
            stop = int(np.searchsorted(ends, before + self.most_partials, side="right"))
            if stop < len(seen):
                stop = min(len(seen), start + max(WAVE_ROWS, (stop - start) // WAVE_ROWS * WAVE_ROWS))
            yield slice(start, stop)
            start = stop

    def _paths_of(self, wave: slice) -> list[_Path]:
        """Return the paths with only the rows of a wave."""
        rows = range(wave.start, wave.stop)
        if len(rows) == len(self.tokens):
            return self._paths
        paths = (path._replace(rows=[row for row in path.rows if row in rows]) for path in self._paths)
        return [path for path in paths if path.rows]

    def _tiles(self, stacks: list[_Stack]) -> _Tiles:
        heights = np.asarray([len(stack.splits) for stack in stacks])
        tiles = int(heights.sum())
        padded = max(MIN_TILES, 1 << (tiles - 1).bit_length())
        counts = np.asarray([len(stack.rows) for stack in stacks])
        rows = np.zeros((len(stacks), self.tile_rows), dtype=np.int32)
        rows[np.arange(self.tile_rows) < counts[:, None]] = [row for stack in stacks for row in stack.rows]
        keys = np.full(padded * SPLIT, PADDING_SLOT, dtype=np.int32)
        bottom = 0
        for stack in stacks:
            top = bottom
            for own in stack.keys.of(stack.splits):
                keys[top : top + len(own)] = own
                top += len(own)
            bottom += len(stack.splits) * SPLIT
        below = np.cumsum(heights) - heights
        firsts = np.asarray([stack.splits.start for stack in stacks])
        return _Tiles(
            counts=_padded(np.repeat(counts, heights), padded),
            splits=_padded(np.arange(tiles) - np.repeat(below - firsts, heights), padded),
            row_indices=_padded(np.repeat(rows, heights, axis=0), padded),
            keys=keys.reshape(padded, SPLIT),
        )

    def _stacks(self, paths: list[_Path]) -> Iterator[_Stack]:
        """Yield the tiles of these paths. Only neighbouring paths are compared: sorting puts texts with the same first
        slot next to each other, and the leaves of one session already are neighbours."""
        paths = sorted(paths, key=lambda path: path.first)
        paths[1:] = [
            _Path(b.first, b.keys, b.rows, _common_splits(a.keys, b.keys)) if a.first == b.first else b
            for a, b in pairwise(paths)
        ]
        waiting = [(0, paths)]  # (split, paths that agree on all earlier splits)
        while waiting:
            start, group = waiting.pop()
            rows = group[0].rows if len(group) == 1 else [row for path in group for row in path.rows]
            stop = max(map(self.positions.__getitem__, rows)) // SPLIT + 1
            if len(group) > 1:
                # Up to `stop` all paths agree and share tiles; there the group divides between neighbours that differ.
                stop = min(path.shared for path in group[1:])
                cuts = [i for i, path in enumerate(group) if i == 0 or path.shared == stop]
                waiting += [(stop, group[a:b]) for a, b in zip(cuts, [*cuts[1:], len(group)], strict=True)]
            if start < stop:
                yield from self._of_rows(group[0].keys, rows, start, stop)

    def _of_rows(self, keys: _Keys, rows: list[int], start: int, stop: int) -> Iterator[_Stack]:
        """Yield the tiles of splits start..stop-1 of one text. A row reads no split that begins after its position."""
        if len(rows) == 1:
            yield _Stack(keys, range(start, stop), rows)
            return
        ends = [min(self.positions[row] // SPLIT + 1, stop) for row in rows]
        for end in sorted(set(ends)) if min(ends) < stop else (stop,):
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


def _common_splits(a: _Keys, b: _Keys) -> int:
    """Return how many leading splits are known to have the same slots in both. If the texts' lengths differ, nothing
    beyond the shorter text is compared."""
    common = len(a.text) if a.text is b.text else _equal(a.text, b.text)
    if common == len(a.text) == len(b.text):
        common += _equal(a.rest, b.rest)
    return common // SPLIT


def _equal(a: Slots, b: Slots) -> int:
    """Return how many leading slots are the same in both, in whole splits."""
    whole = min(len(a), len(b)) // SPLIT * SPLIT
    if not whole:
        return 0
    differ = a[:whole] != b[:whole]
    first = int(differ.argmax())
    return first // SPLIT * SPLIT if differ[first] else whole


def _padded(array: NDArray[np.int64] | Integers, length: int) -> Integers:
    """Return the array as int32, zero-padded to this length."""
    result = np.zeros((length, *array.shape[1:]), dtype=np.int32)
    result[: len(array)] = array
    return result
