"""The pace of a model's passes while a pair is evaluated: other processes may slow them down."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

TIMED_ROWS = (1, 8)
"""Numbers of rows of the timed passes."""

ROUND_SECONDS = 0.1
"""Seconds of passes after which a measurement ends."""

MAX_SPREAD = 1.5
"""Spread of pass times above which predictions are unusable, since they compare different speeds of the machine."""


class Pace:
    """Mean pass times relative to the shortest, measured repeatedly. Predictions contain such delays, so the report has
    mean times, not the shortest."""

    def __init__(self, run: Callable[[int], float], least: Callable[[int], float]) -> None:
        """`run` runs a pass over a number of rows and returns its seconds; `least` returns the shortest known seconds
        of such a pass."""
        self._run = run
        self._least = least
        self._found: list[float] = []
        self.measure()

    def measure(self) -> None:
        """Measure once more."""
        ratios, spent = list[float](), 0.0
        while spent < ROUND_SECONDS:
            for rows in TIMED_ROWS:
                seconds = self._run(rows)
                ratios.append(seconds / self._least(rows))
                spent += seconds
        self._found.append(fmean(ratios))

    def seconds(self, rows: int) -> float:
        """Return the mean seconds of a pass."""
        return fmean(self._found) * self._least(rows)

    @property
    def spread(self) -> float:
        """The slowest measurement divided by the fastest."""
        return max(self._found) / min(self._found)
