"""A split-KV batch on the GPU: one piece of memory at a fixed address, filled by one transfer.

Because the address is fixed, a CUDA graph captured with these tensors can be replayed with other contents.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.gpu.layout import SplitKvBatch, Wave
from specdec.engine.partials import SPLIT


def upload(array: NDArray[Any], device: torch.device) -> Tensor:
    """Return the array as a tensor on the device; on a CPU it shares the array's memory.

    From pageable memory, the GPU driver copies only after all earlier work, and blocks the host. So the copy goes
    through pinned memory from torch's pool, which tracks the end of each copy.
    """
    here = torch.from_numpy(array)
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


ALIGNMENT = 32
"""Alignment of each tensor's start, in numbers, so that kernels may use wide loads."""


class SplitKvTensors:
    """The int32 tensors for batches of exactly these numbers of rows, wanted rows and tiles."""

    def __init__(self, rows: int, wanted: int, tiles: int, tile_rows: int, device: torch.device | str) -> None:
        shapes = {
            "tokens": (rows,),
            "positions": (rows,),
            "slots": (rows,),
            "first_partials": (rows,),
            "wanted": (wanted,),
            "tile_counts": (tiles,),
            "tile_splits": (tiles,),
            "tile_row_indices": (tiles, tile_rows),
            "tile_keys": (tiles, SPLIT),
        }
        self._shapes = shapes
        size = sum(_aligned(math.prod(shape)) for shape in shapes.values())
        self._there = torch.zeros(size, dtype=torch.int32, device=device)
        on_gpu = self._there.device.type == "cuda"
        self._here = torch.zeros(size, dtype=torch.int32, pin_memory=True) if on_gpu else self._there
        self._sent = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]
        views = self._views(self._there)
        self.tokens = views["tokens"]  # [t]
        self.positions = views["positions"]  # [t]
        self.slots = views["slots"]  # [t]
        self.first_partials = views["first_partials"]  # [t]
        self.wanted = views["wanted"]  # [n]
        self.tile_counts = views["tile_counts"]  # [u]
        self.tile_splits = views["tile_splits"]  # [u]
        self.tile_row_indices = views["tile_row_indices"]  # [u, tile_rows] row indices
        self.tile_keys = views["tile_keys"]  # [u, SPLIT]
        self.partials = 0  # in the batch's largest wave
        self.waves: tuple[Wave, ...] = ()  # of the batch
        self._arrays = {name: view.numpy() for name, view in self._views(self._here).items()}

    @classmethod
    def of(cls, batch: SplitKvBatch, device: torch.device | str) -> SplitKvTensors:
        """Make tensors of the batch's sizes, filled with the batch."""
        tiles, tile_rows = batch.tile_row_indices.shape
        tensors = cls(len(batch.tokens), len(batch.wanted), tiles, tile_rows, device)
        tensors.fill(batch)
        return tensors

    def fill(self, batch: SplitKvBatch) -> None:
        """Replace the batch, after waiting for the previous transfer; ValueError if its sizes differ."""
        for name, array in self._arrays.items():
            shape = getattr(batch, name).shape
            if shape != array.shape:
                raise ValueError(f"{name} has shape {shape}, the tensors are for {array.shape}")
        if self._sent is not None:
            self._sent.synchronize()  # the previous batch may still be in transfer from this memory
        for name, array in self._arrays.items():
            array[...] = getattr(batch, name)
        self.partials, self.waves = batch.partials, batch.waves
        if self._sent is not None:
            self._there.copy_(self._here, non_blocking=True)
            self._sent.record()

    def _views(self, memory: Tensor) -> dict[str, Tensor]:
        views, start = {}, 0
        for name, shape in self._shapes.items():
            size = math.prod(shape)
            views[name] = memory[start : start + size].view(shape)
            start += _aligned(size)
        return views


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
