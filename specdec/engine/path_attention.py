"""Attention over paths on the CPU: one loop for every row, compiled by Numba.

For a row: the dot products with its keys in order of position, their softmax, the sum of its values. Nothing
is gathered, padded or masked, keys and values are read where they lie, all heads of a key together as memory
has them, and no row's arithmetic depends on another's: the same token at the same place of the same text has
the same bits in every batch. Memory and queries may be bfloat16; all arithmetic is float32.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from specdec.engine.paths import PathBatch

NUMBA = f"{numba.__version__}-{llvm.get_host_cpu_name()}"
"""What compiles the loop, and for which processor: its order of sums may differ elsewhere."""

REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""Sums may be reordered, once and for all, when the loop is compiled; infinities and NaNs keep their meaning."""


@dataclass
class PathMemory:
    """Keys and values of all layers, [slots, heads, width] each; bfloat16 is seen by NumPy as its bits."""

    keys: list[Tensor]
    values: list[Tensor]

    def __post_init__(self) -> None:
        self.arrays = [(_array(k), _array(v)) for k, v in zip(self.keys, self.values, strict=True)]


class PathAttention:
    """What the model's layers ask in one forward pass."""

    def __init__(self, memory: PathMemory, batch: PathBatch) -> None:
        batch.check(len(memory.keys[0]))
        self._memory = memory
        self._batch = batch
        self._scores = np.empty((0, 0), np.float32)

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
        keys, values = self._memory.arrays[layer]
        batch = self._batch
        if len(self._scores) < query.shape[1]:  # layers may differ in heads
            self._scores = np.empty((query.shape[1], batch.positions.max() + 1), np.float32)
        out = torch.empty((*query.shape[:2], value.shape[2]), dtype=torch.float32)
        kernel(query.shape[2], value.shape[2])(
            query.float().contiguous().numpy(),
            _array(key.contiguous()),
            _array(value.contiguous()),
            keys,
            values,
            batch.slots,
            batch.keys,
            batch.first,
            batch.positions,
            window or np.iinfo(np.int64).max,
            np.float32(scale),
            np.float32(softcap or 0.0),
            self._scores,
            out.numpy(),
        )
        return out.to(query.dtype)


def _array(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The tensor's memory: float32, or bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic  # type: ignore[untyped-decorator]
def _widened(_context: Any, stored: Any) -> Any:
    """float32 of a stored number: itself, or the bits of a bfloat16 and sixteen zeros."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (number,) = arguments
        if signature.args[0] == types.float32:
            return number
        bits = builder.shl(builder.zext(number, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(_context: Any, bits: Any) -> Any:
    """The float32 with these bits (int32)."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(inline="always", fastmath=REORDERED)  # type: ignore[untyped-decorator]
def _exp(x: Any) -> Any:
    """e**x for x <= 0 to two units in the last place, in a form that loops over it are vectorised (after
    Cephes' expf: a power of two times a polynomial)."""
    x = max(x, np.float32(-87.0))
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - whole * np.float32(0.693359375) - whole * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * rest + np.float32(1.3981999507e-3)
    p = p * rest + np.float32(8.3334519073e-3)
    p = p * rest + np.float32(4.1665795894e-2)
    p = p * rest + np.float32(1.6666665459e-1)
    p = p * rest + np.float32(5.0000001201e-1)
    p = p * rest * rest + rest + np.float32(1.0)
    return p * _from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))


@functools.cache
def kernel(width: int, value_width: int) -> Callable[..., None]:
    """The loop for heads of these widths, which are constants in it so that its inner loops unroll."""

    @numba.njit(nogil=True, fastmath=REORDERED)  # type: ignore[untyped-decorator]
    def attend(
        query: Any,  # float32 [t, heads, width]
        new_keys: Any,  # as stored [t, kv_heads, width]
        new_values: Any,
        keys: Any,  # as stored [slots, kv_heads, width]
        values: Any,
        slots: Any,  # [t] where the new ones go
        path: Any,  # slots of all paths
        first: Any,  # [t] where a row's path begins
        positions: Any,  # [t]
        window: Any,  # how many tokens back a row sees, itself included
        scale: Any,
        softcap: Any,  # 0: none
        scores: Any,  # float32 [heads, keys], room for a row's
        out: Any,  # float32 [t, heads, value_width]
    ) -> None:
        rows, heads, _ = query.shape
        shared = heads // keys.shape[1]  # query heads of one key head
        for r in range(rows):
            for kv_head in range(keys.shape[1]):
                for d in range(width):
                    keys[slots[r], kv_head, d] = new_keys[r, kv_head, d]
                for d in range(value_width):
                    values[slots[r], kv_head, d] = new_values[r, kv_head, d]
        for r in range(rows):
            end = positions[r] + 1
            begin = max(0, end - window)
            own = path[first[r] : first[r] + end]
            for j in range(begin, end):
                slot = own[j]
                for head in range(heads):
                    q, k = query[r, head], keys[slot, head // shared]
                    score = np.float32(0.0)
                    for d in range(width):
                        score += q[d] * _widened(k[d])
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
                    weight = _exp(weights[j] - best)
                    weights[j] = weight
                    total += weight
                for j in range(begin, end):
                    weights[j] /= total
                for d in range(value_width):
                    out[r, head, d] = np.float32(0.0)
            for j in range(begin, end):
                slot = own[j]
                for head in range(heads):
                    weight, v, o = scores[head, j], values[slot, head // shared], out[r, head]
                    for d in range(value_width):
                        o[d] += weight * _widened(v[d])

    compiled: Callable[..., None] = attend
    return compiled
