"""Whether to put off a step for candidates that are on their way.

A step of time T that is started now, w seconds after the last one, brings E tokens: a rate of E / (T + w). The
next message of a session's draft, due in r seconds, will add about A * q tokens, q being the reach of the best
leaf and A the chance that a guess is right, for a row whose price is p tokens. Waiting pays while (A * q - p) / r,
summed over the sessions, exceeds the rate: the sessions of a step wait together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMOOTHING = 0.2
REMEMBERED_COMMITS = 16


@dataclass(frozen=True)
class WaitEstimate:
    """What a session would bring to a step now, and what it has to hope for."""

    expected: float  # tokens
    gain: float = 0.0  # tokens a second of waiting
    until: float = 0.0  # when the hope is over


def delay_until(estimates: Sequence[WaitEstimate], now: float, last_step: float, step_time: float) -> float | None:
    """Until when to put the step off, or None: step now. Whatever arrives meanwhile opens the question anew."""
    gain = sum(wait_estimate.gain for wait_estimate in estimates)
    expected = sum(wait_estimate.expected for wait_estimate in estimates)
    if gain <= expected / (step_time + now - last_step):
        return None
    return min(wait_estimate.until for wait_estimate in estimates if wait_estimate.gain)


class DraftTiming:
    """What one session has learned of its draft: how soon it answers a commit, how fast it goes on, how often
    it is right. Seconds; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._acceptance = 0.7
        self._delay = 0.003  # from a commit to the first candidates that know of it
        self._gap = 0.001  # from one message to the next
        self.round_trip = 0.0  # of a commit to the draft and of candidates back; 0: unknown
        self._commits: dict[int, float] = {}  # base -> when it became so
        self._last: dict[int, float] = {}  # base -> when the last message that knows of it came
        self._awaited: float | None = None  # until when a message is hoped for
        self._given_up = False  # since the last commit or message

    def committed(self, base: int, now: float) -> None:
        """The text has `base` tokens from now on."""
        self._awaited, self._given_up = None, False
        self._commits[base] = now
        if len(self._commits) > REMEMBERED_COMMITS:
            oldest = next(iter(self._commits))
            del self._commits[oldest]
            self._last.pop(oldest, None)

    def arrived(self, base: int, at: float, held: float = 0.0) -> None:
        """A message that starts at `base` came; late ones teach as well. Its sender had known of `base` for `held`
        seconds: what else has passed since the commit was spent on the way."""
        self._awaited, self._given_up = None, False
        begun = self._commits.get(base)
        if begun is None:
            return
        way = at - begun - held
        if held > 0 and way > 0:
            self.round_trip += SMOOTHING * (way - self.round_trip) if self.round_trip else way
        if base in self._last:
            self._gap += SMOOTHING * (at - self._last[base] - self._gap)
        else:
            self._delay += SMOOTHING * (at - begun - self._delay)
        self._last[base] = at

    def verified(self, accepted: int, corrected: bool) -> None:
        """A step took `accepted` candidates and then, perhaps, another token than was offered."""
        for right in [True] * accepted + [False] * corrected:
            self._acceptance += 0.05 * (right - self._acceptance)

    def wait_estimate(
        self, base: int, now: float, *, expected: float, leaf: float, price: float, patience: float
    ) -> WaitEstimate:
        """`expected` tokens would come of a step now, `leaf` is the reach of the best leaf; what hangs below it must be
        worth the `price` of its row. Hope ends at twice the time that a message usually takes, or with `patience` after
        the last commit."""
        if self._awaited is not None and now >= self._awaited:
            self._give_up(base, now)
        begun = self._commits[base]
        since, usual = (self._last[base], self._gap) if base in self._last else (begun, self._delay)
        until = min(since + 2 * usual, begun + patience)
        gain = self._acceptance * leaf - price
        if self._given_up or now >= until or gain <= 0:
            return WaitEstimate(expected)
        self._awaited = until
        return WaitEstimate(expected, gain / max(since + usual - now, 1e-4), until)

    def _give_up(self, base: int, now: float) -> None:
        """What was awaited takes at least that long."""
        self._awaited, self._given_up = None, True
        if base in self._last:
            self._gap = max(self._gap, now - self._last[base])
        else:
            self._delay = max(self._delay, now - self._commits[base])
