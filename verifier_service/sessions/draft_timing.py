"""Measurements of a session's draft: when its next candidates can be expected, and what waiting for them brings."""

from __future__ import annotations

from typing import NamedTuple

from verifier_service.settings.tuning import DEFAULTS, DraftTimingTuning

LONGEST_WAY = 60.0
"""Seconds of a round trip from which on a draft's word for how long it has known a text is not believed."""


class WaitEstimate(NamedTuple):
    """A session's wait estimate: what it would bring to a step now, and what waiting for its draft would add."""

    expected: float  # tokens that it would bring now
    gain: float = 0.0  # tokens that a second of waiting is expected to add
    until: float = 0.0  # when to stop waiting for it


class DraftTiming:
    """A session's measurements of its draft: how soon it answers a commit, how fast further messages follow, how often
    its candidates are accepted. In seconds; times are those of `time.monotonic`."""

    def __init__(self, tuning: DraftTimingTuning = DEFAULTS.draft_timing) -> None:
        self._tuning = tuning
        self._acceptance = tuning.first_acceptance
        self._delay = tuning.first_delay  # from a commit to the first message of candidates that know of it
        self._gap = tuning.first_gap  # from one message of candidates to the next
        self.round_trip = 0.0  # way of a commit to the draft and of candidates back; 0: unknown
        self._commits: dict[int, float] = {}  # base -> when the text came to have so many tokens
        self._last: dict[int, float] = {}  # base -> when the last message that starts there came
        self._awaited: float | None = None  # until when the session waits for a message
        self._given_up = False  # waiting was in vain, since the last commit or message

    def committed(self, base: int, now: float) -> None:
        """Note that the text has `base` tokens from now on."""
        self._awaited, self._given_up = None, False
        self._commits[base] = now
        if len(self._commits) > self._tuning.remembered_commits:
            oldest = next(iter(self._commits))
            del self._commits[oldest]
            self._last.pop(oldest, None)

    def arrived(self, base: int, at: float, held: float = 0.0) -> None:
        """Learn from a message that starts at `base`, even if it is late. The draft had known of `base` for `held`
        seconds; the rest of the time since the commit is the round trip."""
        self._awaited, self._given_up = None, False
        begun = self._commits.get(base)
        if begun is None:
            return
        way = at - begun - held
        if held > 0 and 0 < way < LONGEST_WAY:
            self.round_trip += self._tuning.smoothing * (way - self.round_trip) if self.round_trip else way
        if base in self._last:
            self._gap += self._tuning.smoothing * (at - self._last[base] - self._gap)
        else:
            self._delay += self._tuning.smoothing * (at - begun - self._delay)
        self._last[base] = at

    def verified(self, accepted: int, corrected: bool) -> None:
        """Learn from a step that accepted so many candidates; `corrected`: the next token was none of those offered."""
        for right in [True] * accepted + [False] * corrected:
            self._acceptance += self._tuning.acceptance_smoothing * (right - self._acceptance)

    def wait_estimate(
        self, base: int, now: float, *, expected: float, leaf: float, price: float, patience: float
    ) -> WaitEstimate:
        """Return the wait estimate of a session whose text has `base` tokens.

        `expected` tokens would come of a step now; `leaf` is the path probability of the best leaf; `price` is the
        break-even probability, which the gain of a candidate below that leaf must exceed. Waiting ends at twice the
        time that a message usually takes, or `patience` seconds after the last commit.
        """
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
        """Stop waiting, and learn that the awaited message takes at least that long."""
        self._awaited, self._given_up = None, True
        if base in self._last:
            self._gap = max(self._gap, now - self._last[base])
        else:
            self._delay = max(self._delay, now - self._commits[base])
