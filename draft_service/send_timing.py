"""The send timer: decides when a session's candidates are sent.

A message helps if it is at the verifier when a step begins, and the later it is sent, the more it holds. If several fit
into a step, they follow one another at an interval, and the first goes out at once. If only one does (each takes time
of the verifier's interpreter), it is sent just in time: commits come at the pace of the steps, so the next step begins
about a period after the last commit, and its candidates must leave a round trip earlier, since the commit takes one way
to the draft and the candidates take one way back.

Period and deviation are estimated as TCP does it for its timeout (Jacobson 1988, "Congestion avoidance and control"):
moving averages, and a margin of the mean deviation. A wrong estimate costs little. If it is too early, candidates leave
no earlier than they would without it; if a commit comes before candidates were sent, they go out at once.
"""

from __future__ import annotations

import math

SMOOTHING = 0.2
"""Weight of the latest gap between commits in the moving averages."""

OUTLIER = 2.0
"""Most periods that a gap between commits counts as: a session may have waited for memory or for its reader."""


class SendTimer:
    """The send timer of one session. Times are in seconds; moments are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._committed_at = -math.inf  # when the last commit came
        self._sent_at = -math.inf
        self._period = 0.0  # mean time between commits; 0: unknown
        self._deviation = 0.0  # mean deviation of the period
        self._sent_since = True  # True: something was sent since the last commit, or there was no commit yet
        self._missed = False  # True: the last commit came before anything was sent, though there was something

    def committed(self, now: float, *, unsent: bool = False) -> None:
        """Note that a commit came; `unsent`: while there was something to send."""
        gap = now - self._committed_at
        if self._period:
            gap = min(gap, OUTLIER * self._period)
            self._deviation += SMOOTHING * (abs(gap - self._period) - self._deviation)
            self._period += SMOOTHING * (gap - self._period)
        elif gap < math.inf:
            self._period, self._deviation = gap, gap / 2
        self._missed = unsent and not self._sent_since
        self._committed_at, self._sent_since = now, False

    def sent(self, now: float) -> None:
        self._sent_at, self._sent_since, self._missed = now, now >= self._committed_at, False

    def base_age(self, now: float) -> float:
        """Return the seconds since the last commit came; 0 if none has."""
        return now - self._committed_at if self._committed_at > -math.inf else 0.0

    def next_send_at(self, interval: float, round_trip: float, step: float, *, urgent: bool) -> float:
        """Return the moment from which on the next message is due, perhaps long past.

        `interval`: least time between two messages; `step`: duration of a draft's step, between two of which messages
        can be sent; `urgent`: the verifier has no candidates of this tree."""
        if not self._once(interval):
            return -math.inf if urgent else self._sent_at + interval
        if self._missed:
            return -math.inf
        moment = self._committed_at + self._period - round_trip % self._period - self._deviation - 2 * step
        moment = max(moment, self._committed_at)
        return moment if self._sent_at < moment else self._sent_at + interval

    def _once(self, interval: float) -> bool:
        """Return True if a step of the verifier has time for one message only."""
        return 0 < self._period < 2 * interval
