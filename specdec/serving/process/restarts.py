"""When a process that died is started again, and when no more.

Pauses double from death to death. A process that was ready for a while has shown that it can serve: its next death is
the first one again. It knows nothing of processes, only of what is said of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

DEATHS = 5
"""Deaths in a row that are no accident: what dies so often is not started again."""

CALM_SECONDS = 30.0
"""Seconds of being ready after which a death begins a new row."""

FIRST_PAUSE_SECONDS = 0.25
"""Seconds before the first new start; an accident should cost clients little more than the start itself."""


class Restarts:
    """The deaths in a row of one process."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ready_since: float | None = None
        self.deaths = 0
        """Deaths in a row so far."""

    def ready(self) -> None:
        """Note that a process takes calls."""
        self._ready_since = self._clock()

    def died(self) -> float | None:
        """Note a death; return the seconds until the next start, None if there should be none."""
        if self._ready_since is not None and self._clock() - self._ready_since >= CALM_SECONDS:
            self.deaths = 0
        self._ready_since = None
        self.deaths += 1
        return FIRST_PAUSE_SECONDS * 2 ** (self.deaths - 1) if self.deaths < DEATHS else None
