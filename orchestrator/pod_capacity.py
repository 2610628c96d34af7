"""How full a pod is: what it last told, corrected by what was opened since from here."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.v2 import model_pb2

STALE_SECONDS = 2.5
"""A pod with sessions tells its load every second or so, of each; what it told longer ago says nothing any more."""


class PodCapacity:
    """Of one pod."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ours = 0  # sessions from here
        self.coming = 0  # of those who want to open one here
        self.opening = 0  # of them, who is not kept waiting
        self._told: model_pb2.PodCapacity | None = None
        self._told_until = 0.0
        self._others = 0  # sessions that are not from here, as far as is known

    @contextmanager
    def session(self) -> Iterator[None]:
        """Around a session from here."""
        self.ours += 1
        try:
            yield
        finally:
            self.ours -= 1

    def report(self, reported: model_pb2.PodCapacity, seconds: float = STALE_SECONDS) -> None:
        """What the pod says holds for so long, unless it says otherwise."""
        self._told, self._told_until = reported, self._clock() + seconds
        self._others = max(0, reported.sessions - self.ours - self.opening)

    @property
    def reported(self) -> model_pb2.PodCapacity | None:
        """What still holds of what the pod last told."""
        return self._told if self._clock() < self._told_until else None

    @property
    def sessions(self) -> int:
        """Of everybody, those that are on their way included."""
        return self.ours + self.coming + (self._others if self.reported else 0)
