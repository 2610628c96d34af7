"""A limit on the time that a training works."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeLimit:
    """A limit on the time spent in `running`. Time outside, such as for loading models or measuring a draft, does not
    count: a short limit would leave none for the training."""

    def __init__(self, seconds: float = math.inf, clock: Callable[[], float] = time.monotonic) -> None:
        self._left = seconds
        self._clock = clock

    @contextmanager
    def running(self) -> Iterator[float]:
        """Let the clock run within this context, which gets the clock's time when the limit is reached."""
        until = self._clock() + self._left
        try:
            yield until
        finally:
            self._left = until - self._clock()
