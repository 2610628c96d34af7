"""Attention over paths on the CPU: one loop for every row, compiled by Numba.

For a row: the dot products with its keys in order of position, their softmax, the sum of its values. Nothing
is gathered, padded or masked, keys and values are read where they lie, all heads of a key together as memory
has them, and no row's arithmetic depends on another's: the same token at the same place of the same text has
the same bits in every batch. Memory and queries may be bfloat16; all arithmetic is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine import team
from specdec.engine.arithmetic import REORDERED, Array, array_of, exp, narrowed, widened
from specdec.engine.paths import PathBatch

SHARED_FROM = 1 << 16
"""Numbers in the keys of all rows from which it pays to share them among threads: some ten microseconds' work."""

EVERYTHING = np.iinfo(np.int64).max
"""A window that is none."""


@dataclass
class PathMemory:
    """Keys and values of all layers, [slots, kv_heads, width] each, and how many threads read them. Where all layers'
    have the same shape they may be one tensor."""

    keys: Sequence[Tensor] | Tensor
    values: Sequence[Tensor] | Tensor
    threads: int = 1

    def __post_init__(self) -> None:
        self.arrays = [(array_of(k), array_of(v)) for k, v in zip(self.keys, self.values, strict=True)]
        self.whole: tuple[Array, Array] | None = None  # [layers, slots, kv_heads, width] each
        if isinstance(self.keys, Tensor) and isinstance(self.values, Tensor):
            self.whole = array_of(self.keys), array_of(self.values)


class PathAttention:
    """What the model's layers ask in one forward pass."""

    def __init__(self, memory: PathMemory, batch: PathBatch) -> None:
        batch.check(len(memory.keys[0]))
        self.batch = batch
        self.memory = memory
        self._cuts: dict[tuple[int, int], team.Cuts] = {}  # by the shape of a key

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
            window or EVERYTHING,
            np.float32(scale),
            np.float32(softcap or 0.0),
            array_of(out),
            self.shares_of(*key.shape[1:]),
        )
        return out

    @property
    def threads(self) -> int:
        """That compute."""
        return self.memory.threads

    def shares_of(self, kv_heads: int, width: int) -> team.Cuts:
        """Of the batch, for keys of this shape."""
        cuts = self._cuts.get((kv_heads, width))
        if cuts is None:
            cuts = self._cuts[kv_heads, width] = shares(self.batch.positions, kv_heads, width, self.threads)
        return cuts


def shares(positions: NDArray[np.int64], kv_heads: int, width: int, threads: int) -> team.Cuts:
    """The batch's kv heads, row by row, cut so that each thread reads about as many keys; a single share where there is
    little to read."""
    ends = np.cumsum(np.repeat(positions + 1, kv_heads))
    if not team.AVAILABLE or ends[-1] * width < SHARED_FROM:
        return np.asarray([0, len(ends)])
    middles = ends - np.repeat(positions + 1, kv_heads) / 2
    cuts = np.searchsorted(middles, ends[-1] * np.arange(1, threads) / threads)
    return np.concatenate([[0], cuts, [len(ends)]])


@numba.njit(nogil=True)  # type: ignore[untyped-decorator]
def _store(new_keys: Any, new_values: Any, keys: Any, values: Any, slots: Any) -> None:
    """Write the new rows [t, kv_heads, width] to their slots."""
    for r in range(len(slots)):
        keys[slots[r]] = new_keys[r]
        values[slots[r]] = new_values[r]


@functools.cache
def kernel(width: int, value_width: int) -> Callable[..., None]:
    """The loop for heads of these widths, which are constants in it so that its inner loops unroll."""

    @numba.njit(nogil=True, fastmath=REORDERED, error_model="numpy")  # type: ignore[untyped-decorator]
    def attend(
        query: Any,  # float32 [t, heads, width]
        keys: Any,  # as stored [slots, kv_heads, width]
        values: Any,
        path: Any,  # slots of all paths
        first: Any,  # [t] where a row's path begins
        positions: Any,  # [t]
        window: Any,  # how many tokens back a row sees, itself included
        scale: Any,
        softcap: Any,  # 0: none
        out: Any,  # as stored [t, heads, value_width]
        cuts: Any,  # [2] from which kv head to which, counted row by row
    ) -> None:
        heads, kv_heads = query.shape[1], keys.shape[1]
        shared = heads // kv_heads  # query heads of one key head
        from_row, to_row = cuts[0] // kv_heads, -(-cuts[1] // kv_heads)
        if from_row == to_row:
            return
        longest = 0
        for r in range(from_row, to_row):  # not `max`, which takes a second to compile
            longest = max(longest, positions[r] + 1)
        scores = np.empty((heads, longest), np.float32)
        sums = np.empty((heads, value_width), np.float32)
        for r in range(from_row, to_row):
            end = positions[r] + 1
            begin = max(0, end - window)
            own = path[first[r] + begin : first[r] + end]
            from_head, to_head = max(0, cuts[0] - r * kv_heads), min(kv_heads, cuts[1] - r * kv_heads)
            for j in range(len(own)):
                slot = np.uintp(own[j])
                for kv_head in range(from_head, to_head):
                    k = keys[slot, kv_head]
                    for head in range(kv_head * shared, (kv_head + 1) * shared):
                        q = query[r, head]
                        score = np.float32(0.0)
                        for d in range(width):
                            score += q[d] * widened(k[d])
                        scores[head, j] = score * scale
            for head in range(from_head * shared, to_head * shared):
                weights = scores[head, : len(own)]
                if softcap > 0:
                    for j in range(len(weights)):
                        weights[j] = np.tanh(weights[j] / softcap) * softcap
                best = np.float32(-np.inf)
                for j in range(len(weights)):  # what is no number is never the best, and stays what it is
                    best = weights[j] if weights[j] > best else best
                total = np.float32(0.0)
                for j in range(len(weights)):
                    weight = exp(weights[j] - best)
                    weights[j] = weight
                    total += weight
                share = np.float32(1.0) / total
                for j in range(len(weights)):
                    weights[j] *= share
                for d in range(value_width):
                    sums[head, d] = np.float32(0.0)
            for j in range(len(own)):
                slot = np.uintp(own[j])
                for kv_head in range(from_head, to_head):
                    v = values[slot, kv_head]
                    for head in range(kv_head * shared, (kv_head + 1) * shared):
                        weight, o = scores[head, j], sums[head]
                        for d in range(value_width):
                            o[d] += weight * widened(v[d])
            for head in range(from_head * shared, to_head * shared):
                for d in range(value_width):
                    out[r, head, d] = narrowed(sums[head, d], out[r, head, d])

    return team.shared(attend)
