"""Capacity: how full a pod is, by its last report and by the sessions opened from here since."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from specdec.v2 import model_pb2

STALE_SECONDS = 2.5
"""Lifetime of a report in seconds. A pod reports its capacity about once a second on each of its sessions, so an older
report is out of date."""


CROWD_SECONDS = 5.0
"""Seconds within which the sessions of a dead pod end one after another."""


class PodCapacity:
    """The capacity of one pod."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.ours = 0  # open sessions of this process
        self.coming = 0  # sessions this process is about to open
        self.opening = 0  # those of `coming` that have passed admission
        self._told: model_pb2.PodCapacity | None = None
        self._told_until = 0.0
        self._most, self._most_at = 0, 0.0  # peak of `ours` at the end of a session, and its time
        self._others = 0  # sessions of other processes, as far as known

    @contextmanager
    def session(self) -> Iterator[None]:
        """Count a session of this process while the context lasts."""
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
        """Sessions of this process, including those that have just ended; at least one."""
        return max(1, self.ours, self._most if self._clock() < self._most_at + CROWD_SECONDS else 0)

    def report(self, reported: model_pb2.PodCapacity, seconds: float = STALE_SECONDS) -> None:
        """Take a report of the pod, valid for `seconds` unless another one comes."""
        self._told, self._told_until = reported, self._clock() + seconds
        self._others = max(0, reported.sessions - self.ours - self.opening)

    @property
    def reported(self) -> model_pb2.PodCapacity | None:
        """The pod's last report while it is valid, else None."""
        return self._told if self._clock() < self._told_until else None

    @property
    def sessions(self) -> int:
        """Sessions at the pod, of this process and others, including those about to be opened."""
        return self.ours + self.coming + (self._others if self.reported else 0)
