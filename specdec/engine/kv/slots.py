"""Slots of the KV cache: an allocator of contiguous runs. The tensors belong to the engine."""

from __future__ import annotations

from bisect import insort

import numpy as np
from numpy.typing import NDArray

Slots = NDArray[np.int64]

PADDING_SLOT = 0
"""A slot without an owner: padding rows read from it and write to it."""


class PoolFullError(Exception):
    """Raised when there are too few free slots."""

    def __init__(self, wanted: int, free: int) -> None:
        super().__init__(f"{wanted} key/value slots wanted, {free} free")
        self.wanted = wanted
        self.free = free


class KVPool:
    """A pool of slots 1..capacity-1, one per token, handed out contiguously where possible.

    Contiguous slots let attention read a view instead of a copy. Free memory is a sorted list of (start, length) runs;
    neighbouring runs are merged.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity - 1
        self._runs: list[tuple[int, int]] = [(1, capacity - 1)]

    @property
    def used(self) -> int:
        return self.capacity - 1 - self.free

    def take(self, count: int) -> Slots:
        """Take `count` slots in ascending order: from the first run that is long enough, else from several runs.
        PoolFullError if fewer are free."""
        if count > self.free:
            raise PoolFullError(count, self.free)
        if not count:
            return np.arange(0)
        for index, (start, length) in enumerate(self._runs):
            if length >= count:
                self._runs[index : index + 1] = [(start + count, length - count)] if length > count else []
                self.free -= count
                return np.arange(start, start + count)
        pieces: list[Slots] = []
        missing = count
        while missing:
            start, length = self._runs.pop(0)
            taken = min(length, missing)
            pieces.append(np.arange(start, start + taken))
            if taken < length:
                self._runs.insert(0, (start + taken, length - taken))
            missing -= taken
        self.free -= count
        return np.concatenate(pieces)

    def give(self, slots: Slots) -> None:
        """Return slots to the pool. Each must come from `take` and be returned once."""
        if not len(slots):
            return
        ordered = np.sort(slots)
        breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
        for piece in np.split(ordered, breaks):
            insort(self._runs, (int(piece[0]), len(piece)))
        merged: list[tuple[int, int]] = []
        for start, length in self._runs:
            if merged and merged[-1][0] + merged[-1][1] == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._runs = merged
        self.free += len(slots)
