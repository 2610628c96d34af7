"""Attention over a ragged batch on the CPU: one loop, compiled by Numba.

For each row it computes the dot products with the row's keys in order of position, their softmax, and the weighted sum
of the values. Nothing is gathered, padded or masked; keys and values are read in place. Queries over the same keys
(rows of one path, or query heads that share a key head) are computed in small groups that read the keys once. Still, no
row's arithmetic depends on another's (`cpu/vectors.py`): the same token at the same place of the same text has the same
bits in every batch. Keys, values and queries may be bfloat16; all arithmetic is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.cpu import openmp
from specdec.engine.cpu.arithmetic import REORDERED, Array, array_of, exp, narrowed
from specdec.engine.cpu.compiling import closed, part
from specdec.engine.cpu.layout import RaggedBatch
from specdec.engine.cpu.vectors import dots, weighted_sums

GROUP = 4
"""Queries computed together."""

PIECE = 32
"""Maximum rows of a piece, which are neighbours on one path. A unit of work is one piece with one key head."""

SHARED_FROM = 1 << 16
"""Break-even for sharing attention among threads, in elements of all rows' keys: about ten microseconds of work."""

CACHE_LINE = 64
"""Bytes of a cache line."""

EVERYTHING = np.iinfo(np.int64).max
"""Window of a layer without a sliding window, in tokens."""


class Scratch(NamedTuple):
    """Scratch memory of the loop: a row per thread."""

    integers: NDArray[np.int64]
    floats: NDArray[np.float32]

    @classmethod
    def of(cls, threads: int, longest: int, width: int, value_width: int) -> Scratch:
        """Allocate scratch memory for texts of at most `longest` tokens."""
        integers, floats = 2 * GROUP + 2 * longest, GROUP * (width + value_width + longest)
        return cls(
            np.empty((threads, _whole_lines(integers, 8)), np.int64),
            np.empty((threads, _whole_lines(floats, 4)), np.float32),
        )


def _whole_lines(numbers: int, width: int) -> int:
    """Round a count of numbers of `width` bytes up to whole cache lines, so that no two threads write to the same
    line."""
    in_a_line = CACHE_LINE // width
    return -(-numbers // in_a_line) * in_a_line


@dataclass
class RaggedMemory:
    """Keys and values of all layers, each [kv_heads, slots, width], and the number of threads that read them.

    Keys and values may each be a single tensor if all layers have the same shape. All keys of a head are adjacent,
    since attention reads one head at a time.
    """

    keys: Sequence[Tensor] | Tensor
    values: Sequence[Tensor] | Tensor
    threads: int = 1

    def __post_init__(self) -> None:
        self.arrays = [(array_of(k), array_of(v)) for k, v in zip(self.keys, self.values, strict=True)]
        self.whole: tuple[Array, Array] | None = None  # each [layers, kv_heads, slots, width]
        if isinstance(self.keys, Tensor) and isinstance(self.values, Tensor):
            self.whole = array_of(self.keys), array_of(self.values)


class RaggedAttention:
    """The attention of one forward pass, called by the model's layers."""

    def __init__(self, memory: RaggedMemory, batch: RaggedBatch) -> None:
        batch.check(memory.keys[0].shape[1])
        self.batch = batch
        self.memory = memory
        self.pieces = pieces(batch.first, memory.threads)
        self._cuts: dict[tuple[int, int], openmp.Cuts] = {}  # by number of key heads and key width
        self._scratch: dict[tuple[int, int], Scratch] = {}  # by key width and value width

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        keys, values = self.memory.arrays[layer]
        batch = self.batch
        _store(array_of(key.contiguous()), array_of(value.contiguous()), keys, values, batch.slots)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        kernel(key.shape[2], value.shape[2])(
            query.float().contiguous().numpy(),
            keys,
            values,
            batch.keys,
            batch.first,
            batch.positions,
            self.pieces,
            window or EVERYTHING,
            np.float32(scale),
            np.float32(softcap or 0.0),
            array_of(out),
            *self.scratch(key.shape[2], value.shape[2]),
            self.shares_of(*key.shape[1:]),
        )
        return out

    @property
    def threads(self) -> int:
        return self.memory.threads

    def scratch(self, width: int, value_width: int) -> Scratch:
        """Return the threads' scratch memory for heads of these widths, allocated once."""
        made = self._scratch.get((width, value_width))
        if made is None:
            longest = int(self.batch.positions.max()) + 1
            made = self._scratch[width, value_width] = Scratch.of(self.threads, longest, width, value_width)
        return made

    def shares_of(self, kv_heads: int, width: int) -> openmp.Cuts:
        """Return the `shares` of the batch for keys of this shape, computed once."""
        cuts = self._cuts.get((kv_heads, width))
        if cuts is None:
            cuts = shares(self.batch.positions, self.pieces, kv_heads, width, self.threads)
            self._cuts[kv_heads, width] = cuts
        return cuts


def pieces(first: NDArray[np.int64], threads: int) -> NDArray[np.int64]:
    """Cut rows into pieces of neighbours on one path, a few pieces per thread; return their bounds [p + 1]. `first`:
    start of each row's path."""
    rows = np.arange(len(first))
    size = min(PIECE, max(GROUP, len(first) // (4 * threads)))
    begins = np.concatenate([[True], first[1:] != first[:-1]])  # True at the first row of a path
    behind = rows - np.maximum.accumulate(np.where(begins, rows, 0))
    return np.append(rows[behind % size == 0], len(first))


def shares(
    positions: NDArray[np.int64], pieces: NDArray[np.int64], kv_heads: int, width: int, threads: int
) -> openmp.Cuts:
    """Cut the sequence of the batch's (piece, key head) units into one share per thread, with about equal numbers of
    keys; into a single share if there is little work, or no OpenMP."""
    keys = np.repeat(np.add.reduceat(positions + 1, pieces[:-1]), kv_heads)
    ends = np.cumsum(keys)
    if not openmp.AVAILABLE or ends[-1] * width < SHARED_FROM:
        return np.asarray([0, len(ends)])
    middles = ends - keys / 2
    cuts = np.searchsorted(middles, ends[-1] * np.arange(1, threads) / threads)
    return np.concatenate([[0], cuts, [len(ends)]])


@closed("store")
def _store(new_keys: Any, new_values: Any, keys: Any, values: Any, slots: Any) -> None:
    """Write new keys and values [t, kv_heads, width] to their slots."""
    for r in range(len(slots)):
        for kv_head in range(len(keys)):
            keys[kv_head, slots[r]] = new_keys[r, kv_head]
            values[kv_head, slots[r]] = new_values[r, kv_head]


@functools.cache
def kernel(width: int, value_width: int) -> openmp.SharedLoop:
    """Return the loop for heads of these widths, compiled in as constants.

    It is a single function: LLVM keeps the accumulators in registers only if it sees the whole loop.
    """
    dots_of_one, dots_of_row, dots_of_rows = (
        dots(1, width, fetched=value_width),
        dots(GROUP, width, fetched=value_width),
        dots(GROUP, width),
    )
    sums_of_one, sums_of_all = weighted_sums(1, value_width), weighted_sums(GROUP, value_width)

    def attend(
        query: Any,  # float32 [t, heads, width]
        keys: Any,  # as stored [kv_heads, slots, width]
        values: Any,
        path: Any,  # slots of all paths
        first: Any,  # [t] start of each row's path
        positions: Any,  # [t]
        pieces: Any,  # [p + 1] row bounds of pieces
        window: Any,  # tokens a row sees, itself included, counted backwards
        scale: Any,
        softcap: Any,  # 0: none
        out: Any,  # as stored [t, heads, value_width]
        integers: Any,  # scratch (`Scratch`)
        floats: Any,  # scratch
        cuts: Any,  # [2] first unit (piece, key head) and end
    ) -> None:
        kv_heads, slots = keys.shape[:2]
        shared = query.shape[1] // kv_heads  # query heads per key head
        flat_keys, flat_values = keys.reshape(-1), values.reshape(-1)
        longest = 0
        for r in range(pieces[cuts[0] // kv_heads], pieces[-(-cuts[1] // kv_heads)]):
            longest = max(longest, positions[r] + 1)
        # These arrays hold one group of queries; a query is one head of one row.
        begins, ends = integers[:GROUP], integers[GROUP : 2 * GROUP]  # range of keys each query sees
        places = integers[2 * GROUP :]
        key_at, value_at = places[:longest], places[longest : 2 * longest]
        queries = floats[: GROUP * width].reshape(GROUP, width)
        behind = floats[GROUP * width :]
        sums = behind[: GROUP * value_width].reshape(GROUP, value_width)
        rest = behind[GROUP * value_width :]
        weights = rest[: GROUP * longest].reshape(GROUP, longest)
        for unit in range(cuts[0], cuts[1]):
            piece, kv_head = unit // kv_heads, unit % kv_heads
            row = pieces[piece]
            count = (pieces[piece + 1] - row) * shared
            length = 0
            for r in range(row, pieces[piece + 1]):
                length = max(length, positions[r] + 1)
            own = path[first[row] : first[row] + length]
            for j in range(length):
                place = kv_head * slots + own[j]
                key_at[j], value_at[j] = place * width, place * value_width
            for start in range(0, count, GROUP):
                members = min(GROUP, count - start)
                any_begin, any_end = longest, 0  # keys seen by any query of the group
                all_begin, all_end = 0, longest  # keys seen by all of them
                for i in range(1 if members == 1 else GROUP):
                    number = start + min(i, members - 1)  # repeat the last query to fill the group
                    r, head = row + number // shared, kv_head * shared + number % shared
                    end = positions[r] + 1
                    begin = max(0, end - window)
                    begins[i], ends[i] = begin, end
                    any_begin, any_end = min(any_begin, begin), max(any_end, end)
                    all_begin, all_end = max(all_begin, begin), min(all_end, end)
                    for d in range(width):
                        queries[i, d] = query[r, head, d] * scale
                if members == 1:
                    dots_of_one(queries, flat_keys, key_at, flat_values, value_at, any_begin, any_end, weights)
                elif count == shared:  # all queries belong to one row and share its keys with no other row
                    dots_of_row(queries, flat_keys, key_at, flat_values, value_at, any_begin, any_end, weights)
                else:
                    dots_of_rows(queries, flat_keys, key_at, flat_values, value_at, any_begin, any_end, weights)
                for i in range(members):
                    _soften(weights[i, begins[i] : ends[i]], softcap)
                sums[:members] = 0
                if members == 1:
                    sums_of_one(sums, weights, flat_values, value_at, any_begin, any_end)
                else:
                    # Keys seen by the whole group are summed together, other keys for each query alone: memory that
                    # a query does not see may contain NaN.
                    all_end = max(all_begin, all_end)
                    for i in range(members):
                        sums_of_one(sums[i:], weights[i:], flat_values, value_at, begins[i], min(all_begin, ends[i]))
                    sums_of_all(sums, weights, flat_values, value_at, all_begin, all_end)
                    for i in range(members):
                        sums_of_one(sums[i:], weights[i:], flat_values, value_at, all_end, ends[i])
                for i in range(members):
                    r, head = row + (start + i) // shared, kv_head * shared + (start + i) % shared
                    for d in range(value_width):
                        out[r, head, d] = narrowed(sums[i, d], out[r, head, d])

    attend.__qualname__ = f"attend_{width}_{value_width}"  # becomes part of symbol names (`cpu/openmp.py`)
    return openmp.shared(scratch=2, error_model="numpy")(attend)


@part(loop=True, fastmath=REORDERED, error_model="numpy")
def _soften(weights: Any, softcap: Any) -> None:
    """Replace scores by their softmax, after the softcap if any (0: none)."""
    if softcap > 0:
        for j in range(len(weights)):
            weights[j] = np.tanh(weights[j] / softcap) * softcap
    best = np.float32(-np.inf)
    for j in range(len(weights)):  # NaN never wins the comparison, and stays NaN
        best = weights[j] if weights[j] > best else best
    total = np.float32(0.0)
    for j in range(len(weights)):
        weight = exp(weights[j] - best)
        weights[j] = weight
        total += weight
    share = np.float32(1.0) / total
    for j in range(len(weights)):
        weights[j] *= share
