"""What is on its way into a trunk."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from specdec.v1 import trunk_pb2

BUNDLE_BYTES = 1 << 18
"""Frames of one bundle, about: the next ones wait while it is written, whoever's they are."""


class Outgoing:
    """Frames in order. What is put while one bundle is being written goes into the next."""

    def __init__(self) -> None:
        self._frames: deque[trunk_pb2.Frame] = deque()
        self._news = asyncio.Event()
        self._finished = False

    def put(self, frame: trunk_pb2.Frame) -> None:
        self._frames.append(frame)
        self._news.set()

    def drop(self, stream: int) -> bool:
        """Forget what waits of a stream; whether its beginning was among that."""
        dropped = [frame for frame in self._frames if frame.stream == stream]
        if dropped:
            self._frames = deque(frame for frame in self._frames if frame.stream != stream)
        return any(frame.HasField("begin") for frame in dropped)

    def finish(self) -> None:
        """What was put is the last."""
        self._finished = True
        self._news.set()

    async def write(self, write: Callable[[Sequence[trunk_pb2.Frame]], Awaitable[None]]) -> None:
        """Write bundles until it is finished."""
        while True:
            await self._news.wait()
            if self._frames:
                await write(self._bundle())
            elif self._finished:
                return
            else:
                self._news.clear()

    def _bundle(self) -> list[trunk_pb2.Frame]:
        """At least one frame; of more than that, no more bytes than BUNDLE_BYTES."""
        frames = [self._frames.popleft()]
        size = frames[0].ByteSize()
        while self._frames and (size := size + self._frames[0].ByteSize()) <= BUNDLE_BYTES:
            frames.append(self._frames.popleft())
        return frames
