"""A wrapper giving an engine paged attention: block batches only, and copies of whole blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch
from specdec.engine.engine import Engine
from specdec.engine.kv.blocks import BLOCK
from specdec.engine.kv.slots import PADDING_SLOT, Slots
from specdec.engine.vllm.layout import BlockBatch, BlockPacker


@dataclass
class Paged:
    """Presents the same interface to the step loop as `VllmEngine`."""

    inner: Engine
    mixes_tokens: bool = False  # a block's tokens cannot be cleared one by one, as on CPUs
    chains_only = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def packer(self) -> BlockPacker:
        return BlockPacker()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        assert isinstance(batch, BlockBatch)
        packer = self.inner.packer()
        for first, end, length, table in zip(
            batch.starts[:-1].tolist(), batch.starts[1:].tolist(), batch.lengths.tolist(), batch.tables, strict=True
        ):
            keys = slots_of(table)[:length]
            begin = length - (end - first)
            packer.add_path(keys, list(packer.add_rows(batch.tokens[first:end].tolist(), begin, keys[begin:])))
        for row in batch.wanted.tolist():
            packer.want(row)
        return self.inner.forward(packer.pack())[: len(batch.wanted)]

    def copy(self, source: Slots, target: Slots) -> None:
        clears = source == PADDING_SLOT
        if clears.any():
            _, counts = np.unique(target[clears] // BLOCK, return_counts=True)
            if self.mixes_tokens and (counts < BLOCK).any():
                raise RuntimeError("tokens cannot be cleared one by one")
            self.inner.copy(source[clears], target[clears])
        source, target = source[~clears], target[~clears]
        assert (source % BLOCK == target % BLOCK).all()
        if len(source):
            blocks = np.unique(np.stack([source // BLOCK, target // BLOCK]), axis=1)
            self.inner.copy(slots_of(blocks[0]), slots_of(blocks[1]))


def slots_of(blocks: NDArray[Any]) -> Slots:
    return (blocks[:, None].astype(np.int64) * BLOCK + np.arange(BLOCK)).ravel()
