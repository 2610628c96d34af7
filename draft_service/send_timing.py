"""The send timer: decides when a session's candidates are sent.

A message helps if it reaches the verifier before a step begins, and the later it is sent, the more it contains. If
several messages fit into a step, the first is sent at once and the others at an interval. If only one fits (each takes
time of the verifier's interpreter), it is sent just in time. Commits come at the pace of the steps, so the next step
begins about a period after the last commit; candidates must leave a round trip earlier, since the commit takes one way
to the draft and they take one way back.

Period and deviation are estimated as for TCP's retransmission timeout (Jacobson 1988, "Congestion avoidance and
control"): moving averages, with the mean deviation as margin. A wrong estimate costs little. If it is too early,
candidates still leave no earlier than without it; if a commit comes before candidates were sent, they are sent at once.
"""

from __future__ import annotations

import math

SMOOTHING = 0.2
"""Weight of the latest gap between commits in the moving averages."""

OUTLIER = 2.0
"""Cap on a gap between commits, in periods: the session may have waited for memory or for its client to read."""


class SendTimer:
    """The send timer of one session. Durations are in seconds; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._committed_at = -math.inf  # time of the last commit
        self._sent_at = -math.inf
        self._period = 0.0  # mean time between commits; 0: unknown
        self._deviation = 0.0  # mean deviation of the period
        self._sent_since = True  # the last commit, if any, was followed by a message
        self._missed = False  # the last commit came while candidates were unsent, none sent since the one before

    def committed(self, now: float, *, unsent: bool = False) -> None:
        """Record a commit; `unsent`: candidates were waiting to be sent."""
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
        """Return the seconds since the last commit; 0 before the first."""
        return now - self._committed_at if self._committed_at > -math.inf else 0.0

    def next_send_at(self, interval: float, round_trip: float, step: float, *, urgent: bool) -> float:
        """Return the time at which the next message becomes due, possibly in the past.

        `interval`: minimum time between messages; `step`: duration of a draft step (messages are sent only between
        steps); `urgent`: the verifier has no candidates of this tree.
        """
        if not self._once(interval):
            return -math.inf if urgent else self._sent_at + interval
        if self._missed:
            return -math.inf
        # A round trip longer than a period counts modulo the period: candidates then target a later step. Messages are
        # sent only between draft steps, hence two steps of margin.
        moment = self._committed_at + self._period - round_trip % self._period - self._deviation - 2 * step
        # The margins may exceed the period: never before the commit itself.
        moment = max(moment, self._committed_at)
        return moment if self._sent_at < moment else self._sent_at + interval

    def _once(self, interval: float) -> bool:
        """Return True if a verifier step has time for one message only."""
        return 0 < self._period < 2 * interval
