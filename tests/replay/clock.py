"""A clock that advances only explicitly: reading it has no effect."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

START = 1000.0


class Clock:
    """`now`: seconds."""

    def __init__(self) -> None:
        self.now = START

    def read(self) -> float:
        return self.now

    @contextmanager
    def rules(self) -> Iterator[None]:
        """Replace the time functions by this clock within the context."""
        with patch.object(time, "monotonic", self.read), patch.object(time, "perf_counter", self.read):
            yield
