"""The interface between a torch engine and a batch layout: where keys and values are stored, and how they are read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.hf.attention_hook import PackedAttention
from specdec.engine.hf.pretrained import LayerAttention
from specdec.engine.kv.slots import Slots
from specdec.engine.row_counts import InvariantRowCounts


class AttentionBackend(Protocol):
    """Keys and values of all layers, in one layout."""

    name: str  # part of the numerics fingerprint

    def __init__(
        self, layers: Sequence[LayerAttention], capacity: int, dtype: torch.dtype, device: torch.device
    ) -> None: ...

    def packer(self, rows: InvariantRowCounts | None) -> Packer:
        """Return an empty packer; it pads batches to these row counts, if any."""

    def attention(self, batch: PackedBatch) -> PackedAttention:
        """Return the attention of one forward pass over a batch from this backend's packer."""

    def copy(self, source: Slots, target: Slots) -> None:
        """Copy keys and values from slots to slots, in every layer."""
