"""A faulty network between pods."""

from __future__ import annotations

import random

from testing.delay_proxy import DelayProxy


class BadNetwork(DelayProxy):
    """Delays, stalls, resets, and flips bits past the transport's checksums."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.flipped = 0
        self._generator = random.Random(seed)
        self._to_flip = 0

    def corrupt(self) -> None:
        """Flip one bit of the next data, in either direction."""
        self._to_flip += 1

    def carry(self, data: bytes) -> bytes:
        if not self._to_flip or not data:
            return data
        self._to_flip -= 1
        self.flipped += 1
        changed = bytearray(data)
        changed[self._generator.randrange(len(data))] ^= 1 << self._generator.randrange(8)
        return bytes(changed)
