"""The attention backend for ragged batches, on a CPU."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.arithmetic import NUMBA
from specdec.engine.cpu.attention import RaggedAttention, RaggedMemory
from specdec.engine.cpu.layout import RaggedBatch, RaggedPacker
from specdec.engine.hf.pretrained import LayerAttention
from specdec.engine.kv.slots import Slots
from specdec.engine.memory import touch
from specdec.engine.row_counts import InvariantRowCounts


class RaggedBackend:
    """Holds the keys and values of all layers, each [kv_heads, slots, width]. Attention uses as many threads as torch.

    The system allocates the memory's pages at the first write; `touch_memory` allocates all of them.
    """

    name = f"vectors-numba-{NUMBA}"

    def __init__(
        self, layers: Sequence[LayerAttention], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        keys = _pool([(layer.kv_heads, capacity, layer.width) for layer in layers], dtype)
        values = _pool([(layer.kv_heads, capacity, layer.value_width) for layer in layers], dtype)
        self._memory = RaggedMemory(keys, values)

    def packer(self, rows: InvariantRowCounts | None) -> RaggedPacker:
        return RaggedPacker(rows=rows)

    def attention(self, batch: PackedBatch) -> RaggedAttention:
        assert isinstance(batch, RaggedBatch)  # from our own packer
        self._memory.threads = torch.get_num_threads()
        return RaggedAttention(self._memory, batch)

    def touch_memory(self) -> None:
        for pools in (self._memory.keys, self._memory.values):
            for pool in [pools] if isinstance(pools, Tensor) else pools:
                touch(pool.data_ptr(), pool.nbytes)

    def copy(self, source: Slots, target: Slots) -> None:
        source_rows, target_rows = torch.from_numpy(source), torch.from_numpy(target)
        for pool in (*self._memory.keys, *self._memory.values):
            pool.index_copy_(1, target_rows, pool.index_select(1, source_rows))


def _pool(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype) -> Sequence[Tensor] | Tensor:
    """Allocate memory of these shapes: one tensor if all are equal, else a list."""
    if len(set(shapes)) == 1:
        return _zeros((len(shapes), *shapes[0]), dtype)
    return [_zeros(shape, dtype) for shape in shapes]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return zeros that, unlike torch.zeros, have no physical memory until the first write. They are page-aligned, so
    that no slot's vector straddles more cache lines than necessary."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
