"""The progress of long work, with an estimate of the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

LINE_SECONDS = 10.0
"""Minimum seconds between two lines."""


def left(done: float, total: float, seconds: float) -> str:
    """Return an estimate of the remaining time as text, if `done` of `total` took `seconds`; empty if nothing is done
    yet."""
    if not done:
        return ""
    rest = seconds * (total - done) / done
    if rest < 90:
        return f"about {rest:.0f} s left"
    return f"about {rest / 60:.0f} min left" if rest < 5400 else f"about {rest / 3600:.1f} h left"


class ProgressLines:
    """Progress lines for a person, passed to `say`: at most one in LINE_SECONDS, and one at the end. The work has
    `total` units, which may change meanwhile; `begun` of them were done in earlier runs."""

    def __init__(
        self, say: Callable[[str], None], total: int, *, begun: int = 0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._say = say
        self.total, self._begun = total, begun
        self._clock = clock
        self._began = self._printed_at = clock()

    def heard(self, done: int, line: str) -> None:
        """Record that `done` units are done. If a line is due, say `line` with the remaining time."""
        now = self._clock()
        if now - self._printed_at >= LINE_SECONDS or done >= self.total:
            self._printed_at = now
            self._say(line if done >= self.total else f"{line}, {self.left(done)}")

    def left(self, done: int) -> str:
        """Return the remaining time if `done` units are done."""
        return left(done - self._begun, self.total - self._begun, self._clock() - self._began)
