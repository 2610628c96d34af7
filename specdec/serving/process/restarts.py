"""The restart policy of a process that died.

Back-off doubles with every consecutive death. A process that was ready for CALM_SECONDS has shown that it can serve, so
its next death counts as the first. The policy touches no process; callers report events.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DEATHS = 5
"""Consecutive deaths after which the process is not restarted."""

CALM_SECONDS = 30.0
"""Seconds of being ready after which a death counts as the first again."""

FIRST_PAUSE_SECONDS = 0.25
"""Seconds before the first restart: short compared to the start itself."""


class Restarts:
    """Counts the consecutive deaths of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_since: float | None = None
        self.deaths = 0
        """Consecutive deaths so far."""

    def ready(self) -> None:
        """Record that the process is ready."""
        self._ready_since = self._clock()

    def died(self) -> float | None:
        """Record a death; return the seconds until the restart; None if the process is not to be restarted."""
        if self._ready_since is not None and self._clock() - self._ready_since >= CALM_SECONDS:
            self.deaths = 0
        self._ready_since = None
        self.deaths += 1
        return FIRST_PAUSE_SECONDS * 2 ** (self.deaths - 1) if self.deaths < DEATHS else None
