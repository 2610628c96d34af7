"""Estimates of a session's draft: when its next candidates arrive, and whether they help."""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from verifier_service.settings.tuning import DEFAULTS, DraftGainTuning, DraftTimingTuning

MAX_ROUND_TRIP_SECONDS = 60.0
"""Maximum plausible round trip in seconds; beyond it, the age that the draft reports for a text is ignored."""


class WaitEstimate(NamedTuple):
    """A session's contribution to a step now, and the gain of waiting for its draft."""

    expected: float  # tokens from a step now
    gain: float = 0.0  # expected tokens per second of waiting
    until: float = 0.0  # time to stop waiting for it


class DraftTiming:
    """A session's measurements of its draft: delay from a commit to the first candidates, gap between messages,
    acceptance. Durations are in seconds, times from `time.monotonic`."""

    def __init__(self, tuning: DraftTimingTuning = DEFAULTS.draft_timing) -> None:
        self._tuning = tuning
        self._acceptance = tuning.first_acceptance
        self._delay = tuning.first_delay  # from a commit to the first candidates based on it
        self._gap = tuning.first_gap  # from one message of candidates to the next
        self.round_trip = 0.0  # from the verifier to the draft and back; 0: unknown
        self._commits: dict[int, float] = {}  # base -> time of the commit that reached it
        self._last: dict[int, float] = {}  # base -> time of the last message that starts there
        self._awaited: float | None = None  # time to give up waiting for a message
        self._given_up = False  # gave up since the last commit or message

    def committed(self, base: int, now: float) -> None:
        """Record that the text has `base` tokens as of `now`."""
        self._awaited, self._given_up = None, False
        self._commits[base] = now
        if len(self._commits) > self._tuning.remembered_commits:
            oldest = next(iter(self._commits))
            del self._commits[oldest]
            self._last.pop(oldest, None)

    def arrived(self, base: int, at: float, base_age: float = 0.0) -> None:
        """Update the estimates from a message that starts at `base`, even a late one. `base_age`: seconds that the
        draft had known the text up to `base`; the rest of the time since the commit is the round trip."""
        self._awaited, self._given_up = None, False
        begun = self._commits.get(base)
        if begun is None:
            return
        way = at - begun - base_age
        if base_age > 0 and 0 < way < MAX_ROUND_TRIP_SECONDS:
            self.round_trip += self._tuning.smoothing * (way - self.round_trip) if self.round_trip else way
        if base in self._last:
            self._gap += self._tuning.smoothing * (at - self._last[base] - self._gap)
        else:
            self._delay += self._tuning.smoothing * (at - begun - self._delay)
        self._last[base] = at

    def verified(self, accepted: int, corrected: bool) -> None:
        """Update the acceptance from a step with `accepted` accepted candidates; `corrected`: the next token was not
        among those offered."""
        for right in [True] * accepted + [False] * corrected:
            self._acceptance += self._tuning.acceptance_smoothing * (right - self._acceptance)

    def wait_estimate(
        self, base: int, now: float, *, expected: float, leaf: float, break_even: float, patience: float
    ) -> WaitEstimate:
        """Return the wait estimate of a session with a text of `base` tokens.

        `expected`: tokens from a step now; `leaf`: path probability of the best leaf; `break_even`: probability that a
        candidate below that leaf must exceed to be worth waiting for. Waiting ends once the message takes twice as long
        as usual, and at most `patience` seconds after the last commit.
        """
        if self._awaited is not None and now >= self._awaited:
            self._give_up(base, now)
        begun = self._commits[base]
        since, usual = (self._last[base], self._gap) if base in self._last else (begun, self._delay)
        until = min(since + 2 * usual, begun + patience)
        gain = self._acceptance * leaf - break_even
        if self._given_up or now >= until or gain <= 0:
            return WaitEstimate(expected)
        self._awaited = until
        # An overdue message is expected at any moment; the lower bound avoids a division by zero.
        return WaitEstimate(expected, gain / max(since + usual - now, 1e-4), until)

    def _give_up(self, base: int, now: float) -> None:
        """Stop waiting; the time waited is a lower bound for the awaited message's delay."""
        self._awaited, self._given_up = None, True
        if base in self._last:
            self._gap = max(self._gap, now - self._last[base])
        else:
            self._delay = max(self._delay, now - self._commits[base])


MAX_TENANTS = 256
"""Maximum tenants with a remembered gain; the least recently active one is forgotten first."""


class DraftGain:
    """The gain of a draft for one text. If the gain is next to nothing, the draft rests and is tried again later, when
    the text may have changed in character. `expected`: gain in the tenant's texts."""

    def __init__(self, expected: float | None = None, tuning: DraftGainTuning = DEFAULTS.draft_gain) -> None:
        self._tuning = tuning
        self._gain = tuning.first_gain if expected is None else max(tuning.trial_gain, expected)
        self._seen = tuning.first_weight  # number of steps averaged in the gain
        self._resting = 0  # steps left of the current rest
        self._next_rest = tuning.first_rest_steps

    @property
    def helps(self) -> bool:
        """True if the draft is estimated to help, or is on trial."""
        return not self._resting

    def observe(self, accepted: int) -> None:
        """Add a step with candidates of the draft, `accepted` of them accepted."""
        tuning = self._tuning
        self._seen = min(self._seen + 1, tuning.remembered_steps)
        self._gain += (accepted - self._gain) / self._seen
        if self._gain < tuning.least_gain:
            self._resting = self._next_rest
            self._next_rest = min(2 * self._next_rest, tuning.longest_rest_steps)
        # The draft has helped for a long time: its next rest is short again.
        elif self._gain > 2 * tuning.least_gain and self._seen == tuning.remembered_steps:
            self._next_rest = tuning.first_rest_steps

    def rest(self) -> None:
        """Count a step without the draft."""
        self._resting -= 1
        if not self._resting:
            self._gain, self._seen = self._tuning.trial_gain, self._tuning.first_weight


class TenantGains:
    """Gain of remote drafts by tenant: the prior for a new text."""

    def __init__(self, tuning: DraftGainTuning = DEFAULTS.draft_gain) -> None:
        self._tuning = tuning
        self._gains: OrderedDict[str, float] = OrderedDict()

    def of(self, tenant: str) -> float | None:
        """Return a tenant's gain; None if none of its texts had candidates. Thread-safe."""
        return self._gains.get(tenant)

    def observe(self, tenant: str, accepted: int) -> None:
        """Add a step of one of the tenant's texts."""
        gain = self._gains.get(tenant, self._tuning.first_gain)
        self._gains[tenant] = gain + (accepted - gain) / self._tuning.remembered_steps
        self._gains.move_to_end(tenant)
        if len(self._gains) > MAX_TENANTS:
            self._gains.popitem(last=False)
