"""When a session's candidates are sent.

A message counts if it is at the verifier when a step begins, and holds the more the later it is sent. Where a step may
have several, they follow one another at an interval, and the first goes out at once. Where it may have one (each takes
time of the verifier's interpreter), that one is sent just in time: commits come at the pace of the steps, so the next
step begins about a period after the last commit, and its candidates must leave a round trip earlier, since the draft
heard of that commit one way late and is heard one way late.

Period and deviation are estimated as TCP does it for its timeout (Jacobson 1988, "Congestion avoidance and control"):
moving averages, and a margin of the mean deviation. An estimate that is off costs little. What is too early is sent as
early as it always was; if a commit comes before what was to be sent, that goes out at once.
"""

from __future__ import annotations

import math

SMOOTHING = 0.2

OUTLIER = 2.0
"""A gap longer than so many periods counts as this many: a session may have waited for memory or for its reader."""


class SendTimer:
    """Of one session. Seconds; moments are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._committed_at = -math.inf  # when the last commit came
        self._sent_at = -math.inf
        self._period = 0.0  # between commits; 0: unknown
        self._deviation = 0.0  # mean, of it
        self._sent_since = True  # something was sent since the last commit, or none has come
        self._missed = False  # whether the last commit came before anything was sent, though something was to be

    def committed(self, now: float, *, unsent: bool = False) -> None:
        """A commit came; `unsent`: while there was something to send."""
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
        """How long the last commit has been known for; 0: none has come."""
        return now - self._committed_at if self._committed_at > -math.inf else 0.0

    def next_send_at(self, interval: float, round_trip: float, step: float, *, urgent: bool) -> float:
        """The moment from which on the next message is to be sent, perhaps long past. `interval`: least time between
        two; `step`: of the draft, between two of which messages can be sent; `urgent`: the verifier has nothing of
        this tree."""
        if not self._once(interval):
            return -math.inf if urgent else self._sent_at + interval
        if self._missed:
            return -math.inf
        moment = self._committed_at + self._period - round_trip % self._period - self._deviation - 2 * step
        moment = max(moment, self._committed_at)
        return moment if self._sent_at < moment else self._sent_at + interval

    def _once(self, interval: float) -> bool:
        """Whether a step may have one message."""
        return 0 < self._period < 2 * interval
