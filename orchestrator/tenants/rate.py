"""A rate that may be exceeded for a moment: a token bucket (Turner 1986), with debt."""

from __future__ import annotations

import time
from collections.abc import Callable


class Rate:
    """So many units a minute, as many as that at once after a minute of rest.

    What something takes is known only afterwards (how long a text gets), so spending never fails: it may leave a debt,
    and `seconds_until` says when that is paid.
    """

    def __init__(self, per_minute: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._saved = per_minute  # units
        self._at = clock()

    def spend(self, units: float) -> None:
        self._saved = self._now() - units

    def seconds_until(self, units: float) -> float:
        """Return the seconds until so many units are there, if none are spent meanwhile; 0 if they are."""
        return max(0.0, (min(units, self.per_minute) - self._now()) * 60.0 / self.per_minute)

    def change(self, per_minute: float) -> None:
        """Have another rate from now on. What was spent or saved stays."""
        self._saved = min(self._now(), per_minute)
        self.per_minute = per_minute

    def _now(self) -> float:
        """Return what is saved now."""
        now = self._clock()
        self._saved = min(self.per_minute, self._saved + (now - self._at) * self.per_minute / 60.0)
        self._at = now
        return self._saved
