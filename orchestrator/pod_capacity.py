"""Capacity: how full a pod is, by its last report and by the sessions opened from here since."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.v2 import model_pb2

STALE_SECONDS = 2.5
"""Seconds for which a report counts. A pod reports its capacity every second or so on each of its sessions, so an older
report says nothing any more."""


CROWD_SECONDS = 5.0
"""Seconds in which the sessions of a pod that has died end one after another."""


class PodCapacity:
    """The capacity of one pod."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ours = 0  # sessions from here
        self.coming = 0  # sessions that are to be opened from here
        self.opening = 0  # of these, sessions that no longer wait for admission
        self._told: model_pb2.PodCapacity | None = None
        self._told_until = 0.0
        self._most, self._most_at = 0, 0.0  # sessions from here when one of them ended, and when that was
        self._others = 0  # sessions that are not from here, as far as is known

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count a session from here while the context lasts."""
        self.ours += 1
        try:
            yield
        finally:
            now = self._clock()
            if self.ours >= self._most or now > self._most_at + CROWD_SECONDS:
                self._most, self._most_at = self.ours, now
            self.ours -= 1

    @property
    def crowd(self) -> int:
        """Sessions from here, with those that have just ended; at least one."""
        return max(1, self.ours, self._most if self._clock() < self._most_at + CROWD_SECONDS else 0)

    def report(self, reported: model_pb2.PodCapacity, seconds: float = STALE_SECONDS) -> None:
        """Take a report of the pod, which counts for so many `seconds` unless another one comes."""
        self._told, self._told_until = reported, self._clock() + seconds
        self._others = max(0, reported.sessions - self.ours - self.opening)

    @property
    def reported(self) -> model_pb2.PodCapacity | None:
        """The pod's last report, while it counts; else None."""
        return self._told if self._clock() < self._told_until else None

    @property
    def sessions(self) -> int:
        """Sessions at the pod, from here and from others, including those that are about to be opened."""
        return self.ours + self.coming + (self._others if self.reported else 0)
