"""The send timer: decides when a session's candidates are sent.

A message must reach the verifier before a step begins, but the later it is sent, the more candidates it contains.
Commits arrive once a step; as a commit leaves the verifier, the next step begins. Candidates for the step after that
must leave the draft one period after the commit arrived, minus a round trip (the commit's way here and the candidates'
way back). A round trip longer than a period counts modulo the period: candidates are then in time for a later step.

    deadline = the earliest time from now on of the form  last commit - round trip - deviation + k * period

A message is sent immediately if the minimum interval leaves time for another message before the deadline. Otherwise it
waits for the last draft step that ends before the deadline. The interval never leaves a deadline without a message.

Period and deviation are estimated as for TCP's retransmission timeout (Jacobson 1988, "Congestion avoidance and
control"): moving averages, with the mean deviation as margin. A wrong estimate costs little: if a commit arrives before
candidates were sent, or a deadline passes without a message, candidates are sent immediately.
"""

from __future__ import annotations

import math

SMOOTHING = 0.2
"""Weight of the latest gap between commits in the moving averages."""

OUTLIER = 2.0
"""Cap on a gap between commits, in periods: the session may have waited for memory or for its client to read."""


class SendTimer:
    """The send timer of one session. Durations are in seconds; times are from `time.monotonic`."""

    def __init__(self) -> None:
        self._committed_at = -math.inf  # time of the last commit
        self._sent_at = -math.inf
        self._period = 0.0  # mean time between commits; 0: unknown
        self._deviation = 0.0  # mean deviation of the period
        self._sent_since = True  # the last commit, if any, was followed by a message
        self._missed = False  # candidates waited at the last commit, with no message since the commit before it

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

    def next_send_at(self, now: float, interval: float, round_trip: float, step: float, *, urgent: bool) -> float:
        """Return the time at which the next message becomes due, possibly in the past.

        `interval`: minimum time between messages; `step`: duration of a draft step (messages are sent only between
        steps); `urgent`: the verifier has no candidates of this tree, so the interval is ignored.
        """
        if self._missed:
            return -math.inf
        earliest = -math.inf if urgent else self._sent_at + interval
        if not self._period:
            return earliest
        period = max(self._period, interval)  # a burst of commits after a stall makes the estimate far too short
        deadline = now + (self._committed_at - round_trip - self._deviation - now) % period
        if self._sent_at <= deadline - 2 * period:  # the last deadline passed without a message
            return -math.inf
        # A message sent within a step after the last deadline missed that deadline, so the coming deadline needs a
        # message despite the interval.
        if self._sent_at <= deadline - period + step:
            earliest = min(earliest, deadline - step)
        elif earliest > deadline:
            earliest, deadline = deadline, deadline + period
        return earliest if deadline - max(now, earliest) >= interval else max(earliest, deadline - step)
