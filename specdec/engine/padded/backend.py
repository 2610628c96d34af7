"""The attention backend for padded batches, on any device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.batch import PackedBatch
from specdec.engine.gpu.staging import upload
from specdec.engine.hf.pretrained import LayerAttention, shared_window
from specdec.engine.kv.slots import Slots
from specdec.engine.padded.attention import AttentionGroup, PaddedAttention
from specdec.engine.padded.layout import MIN_ROWS, PaddedBatch, PaddedGroup, PaddedPacker
from specdec.engine.row_counts import InvariantRowCounts


class PaddedBackend:
    """Attention backend over the keys and values of all layers, each [slots, kv_heads, width], updated in place."""

    name = "padded"

    def __init__(
        self, layers: Sequence[LayerAttention], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        place: dict[str, Any] = {"dtype": dtype, "device": device}
        self._capacity, self._device = capacity, device
        self._keys = [torch.zeros(capacity, layer.kv_heads, layer.width, **place) for layer in layers]
        self._values = [torch.zeros(capacity, layer.kv_heads, layer.value_width, **place) for layer in layers]
        self._window = shared_window(layers)

    def packer(self, rows: InvariantRowCounts | None) -> PaddedPacker:
        return PaddedPacker(rows=rows, window=self._window, least_rows=1 if rows is None else MIN_ROWS)

    def attention(self, batch: PackedBatch) -> PaddedAttention:
        assert isinstance(batch, PaddedBatch)  # from our own packer
        in_order = bool((batch.place == np.arange(len(batch.place))).all())
        groups = [self._group(group) for group in batch.groups]
        once = in_order and sum(group.rows.numel() for group in groups) == len(batch.tokens)
        place = None if once else self._tensor(batch.place)
        return PaddedAttention(self, self._tensor(batch.slots), groups, place, fused=True)

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        self._keys[layer].index_copy_(0, slots, keys)
        self._values[layer].index_copy_(0, slots, values)
        return self._keys[layer], self._values[layer]

    def copy(self, source: Slots, target: Slots) -> None:
        source_rows, target_rows = self._tensor(source), self._tensor(target)
        for pool in (*self._keys, *self._values):
            pool.index_copy_(0, target_rows, pool.index_select(0, source_rows))

    def _group(self, group: PaddedGroup) -> AttentionGroup:
        first, length = int(group.keys[0, 0]), group.keys.shape[1]
        keys: Tensor | slice
        if group.contiguous and first + length <= self._capacity:
            keys = slice(first, first + length)
        else:
            keys = self._tensor(group.keys)
        return AttentionGroup(
            keys,
            self._tensor(group.rows),
            self._tensor(group.visible),
            None if group.windowed is None else self._tensor(group.windowed),
        )

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return upload(array, self._device)
