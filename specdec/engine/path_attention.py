"""Attention over paths on the CPU: one loop for every row, compiled by Numba.

For a row: the dot products with its keys in order of position, their softmax, the sum of its values. Nothing
is gathered, padded or masked, keys and values are read where they lie, all heads of a key together as memory
has them, and no row's arithmetic depends on another's: the same token at the same place of the same text has
the same bits in every batch. Memory and queries may be bfloat16; all arithmetic is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.arithmetic import REORDERED, Array, array_of, exp, narrowed, widened
from specdec.engine.paths import PathBatch

SHARED_FROM = 8192
"""Keys, over all rows, from which it pays to share the rows among threads: handing them over takes some 50 us."""

EVERYTHING = np.iinfo(np.int64).max
"""A window that is none."""


@dataclass
class PathMemory:
    """Keys and values of all layers, [slots, heads, width] each, and the threads that read them."""

    keys: list[Tensor]
    values: list[Tensor]
    threads: int = 1

    def __post_init__(self) -> None:
        self.arrays = [(array_of(k), array_of(v)) for k, v in zip(self.keys, self.values, strict=True)]
        self.helpers = ThreadPoolExecutor(self.threads - 1, "attention") if self.threads > 1 else None


class PathAttention:
    """What the model's layers ask in one forward pass."""

    def __init__(self, memory: PathMemory, batch: PathBatch) -> None:
        batch.check(len(memory.keys[0]))
        self.batch = batch
        self._memory = memory
        self._shares = _shares(batch.positions, memory.threads)

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
        keys, values = self.memory_of(layer)
        _store(array_of(key.contiguous()), array_of(value.contiguous()), keys, values, self.batch.slots)
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        self.read(layer, query.float().contiguous().numpy(), array_of(out), scale=scale, softcap=softcap, window=window)
        return out

    def memory_of(self, layer: int) -> tuple[Array, Array]:
        """Keys and values of a layer, as stored, [slots, kv_heads, width]."""
        return self._memory.arrays[layer]

    def read(
        self, layer: int, query: Array, out: Array, *, scale: float, softcap: float | None, window: int | None
    ) -> None:
        """Write to `out` [t, heads, value_width], as stored, what the rows of `query` [t, heads, width], float32, see;
        the batch's own keys and values are in place."""
        keys, values = self._memory.arrays[layer]
        batch = self.batch
        run = functools.partial(
            kernel(query.shape[2], values.shape[2]),
            query,
            keys,
            values,
            batch.keys,
            batch.first,
            batch.positions,
            window or EVERYTHING,
            np.float32(scale),
            np.float32(softcap or 0.0),
            out,
        )
        first, *others = self._shares
        if not others:
            run(*first)
            return
        assert self._memory.helpers is not None  # there is one share for each thread
        helped = [self._memory.helpers.submit(run, *share) for share in others]
        try:
            run(*first)
        finally:
            wait(helped)  # nobody may still read or write when this returns, however it does
        for done in helped:
            done.result()


def _shares(positions: NDArray[np.int64], threads: int) -> list[tuple[int, int]]:
    """Rows (from, to) for each thread, of about as many keys each; all for one where there are few."""
    seen = np.cumsum(positions + 1)
    if threads == 1 or seen[-1] < SHARED_FROM:
        return [(0, len(positions))]
    middles = seen - (positions + 1) / 2
    cuts = np.searchsorted(middles, seen[-1] * np.arange(1, threads) / threads).tolist()
    return [(begin, end) for begin, end in pairwise([0, *cuts, len(positions)]) if begin < end]


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
        from_row: Any,
        to_row: Any,
    ) -> None:
        heads, kv_heads = query.shape[1], keys.shape[1]
        shared = heads // kv_heads  # query heads of one key head
        scores = np.empty((heads, positions[from_row:to_row].max() + 1), np.float32)
        sums = np.empty((heads, value_width), np.float32)
        for r in range(from_row, to_row):
            end = positions[r] + 1
            begin = max(0, end - window)
            own = path[first[r] : first[r] + end]
            for j in range(begin, end):
                slot = np.uintp(own[j])
                for kv_head in range(kv_heads):
                    k = keys[slot, kv_head]
                    for head in range(kv_head * shared, (kv_head + 1) * shared):
                        q = query[r, head]
                        score = np.float32(0.0)
                        for d in range(width):
                            score += q[d] * widened(k[d])
                        scores[head, j] = score
            for head in range(heads):
                weights = scores[head]
                best = np.float32(-np.inf)
                for j in range(begin, end):
                    score = weights[j] * scale
                    if softcap > 0:
                        score = np.tanh(score / softcap) * softcap
                    weights[j] = score
                    best = max(best, score)
                total = np.float32(0.0)
                for j in range(begin, end):
                    weight = exp(weights[j] - best)
                    weights[j] = weight
                    total += weight
                for j in range(begin, end):
                    weights[j] /= total
                for d in range(value_width):
                    sums[head, d] = np.float32(0.0)
            for j in range(begin, end):
                slot = np.uintp(own[j])
                for kv_head in range(kv_heads):
                    v = values[slot, kv_head]
                    for head in range(kv_head * shared, (kv_head + 1) * shared):
                        weight, o = scores[head, j], sums[head]
                        for d in range(value_width):
                            o[d] += weight * widened(v[d])
            for head in range(heads):
                for d in range(value_width):
                    out[r, head, d] = narrowed(sums[head, d], out[r, head, d])

    compiled: Callable[..., None] = attend
    return compiled
