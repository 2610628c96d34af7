"""Back-off: the pauses between retries, and when to stop retrying."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

FIRST_PAUSE_SECONDS = 0.05
"""First pause in seconds, before jitter: too short for a client to notice."""

MAX_PAUSE_SECONDS = 0.5
"""Longest pause in seconds by default: after seconds of waiting, a client does not notice half a second more."""


class Backoff:
    """Exponential pauses of up to `longest` seconds, until `budget` seconds have passed since the first failure.
    Progress resets both. Failures last only while they are repeated: after `lapse` seconds without one, the next is the
    first again."""

    def __init__(
        self,
        budget: float,
        *,
        longest: float = MAX_PAUSE_SECONDS,
        lapse: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.budget = budget
        self._longest = longest
        self._lapse = lapse
        self._clock = clock
        self._jitter = jitter
        self._pauses = 0
        self._failing_since: float | None = None
        self._last_failure = -math.inf

    def progressed(self) -> None:
        self._pauses, self._failing_since = 0, None

    def failed(self) -> None:
        if not self._is_failing:
            self._failing_since = self._clock()
        self._last_failure = self._clock()

    @property
    def exhausted(self) -> bool:
        if self._failing_since is None or not self._is_failing:
            return False
        return self._clock() - self._failing_since >= self.budget

    @property
    def _is_failing(self) -> bool:
        return self._failing_since is not None and self._clock() - self._last_failure <= self._lapse

    def pause(self) -> float:
        """Return the seconds until the next retry, with jitter: callers that failed together must not retry
        together."""
        pause = min(FIRST_PAUSE_SECONDS * (1 << min(self._pauses, 16)), self._longest)
        self._pauses += 1
        return pause * (0.5 + 0.5 * self._jitter())
