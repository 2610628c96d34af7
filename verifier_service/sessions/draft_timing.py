"""Estimates of a session's draft: when its next candidates arrive, and whether they help."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

from verifier_service.settings.tuning import DEFAULTS, DraftGainTuning, DraftTimingTuning

MAX_ROUND_TRIP_SECONDS = 60.0
"""Maximum plausible round trip in seconds; beyond it, the age that the draft reports for a text is ignored."""

MAX_LEVELS = 16
"""Maximum levels that a message is expected to add: few texts accept more candidates in a step."""


class WaitEstimate(NamedTuple):
    """A session's contribution to a step now, and the gain of waiting for its draft."""

    expected: float  # tokens from a step now
    gain: float = 0.0  # expected tokens per second of waiting
    until: float = 0.0  # time to stop waiting for it


@dataclass
class MessageEstimate:
    """The expected next message of a draft: seconds until it arrives, and levels that it adds below the candidates that
    are here."""

    seconds: float
    levels: float = 1.0

    def learn(self, seconds: float, levels: int, smoothing: float) -> None:
        self.seconds += smoothing * (seconds - self.seconds)
        self.levels += smoothing * (levels - self.levels)


@dataclass
class DraftedCommit:
    """A commit, and what the draft has sent since."""

    at: float
    deepest: int  # position of the deepest candidate
    last: float | None = None  # time of the last message that starts at this commit


class DraftTiming:
    """A session's measurements of its draft: the first message after a commit, the messages after it, acceptance.
    Durations are in seconds, times from `time.monotonic`."""

    def __init__(self, tuning: DraftTimingTuning = DEFAULTS.draft_timing) -> None:
        self._tuning = tuning
        self._acceptance = tuning.first_acceptance
        self._first = MessageEstimate(tuning.first_delay)  # since the commit
        self._next = MessageEstimate(tuning.first_gap)  # since the message before
        self.round_trip = 0.0  # from the verifier to the draft and back; 0: unknown
        self._commits: dict[int, DraftedCommit] = {}  # by length of the text
        self._awaited: float | None = None  # time to give up waiting for a message
        self._given_up = False  # gave up since the last commit or message

    def committed(self, base: int, deepest: int, now: float) -> None:
        """Record that the text has `base` tokens as of `now`. `deepest`: position of the deepest candidate below it;
        `base` - 1 if there is none."""
        self._awaited, self._given_up = None, False
        if (known := self._commits.get(base)) is not None:
            known.at = now  # preempted in between: the draft sends nothing twice
            return
        self._commits[base] = DraftedCommit(now, deepest)
        if len(self._commits) > self._tuning.remembered_commits:
            del self._commits[next(iter(self._commits))]

    def arrived(self, base: int, deepest: int, at: float, held: float = 0.0) -> None:
        """Update the estimates from a message that starts at `base`, even a late one. `deepest`: position of its
        deepest candidate; `held`: seconds that the draft had known the text up to `base`; the rest of the time since
        the commit is the round trip."""
        self._awaited, self._given_up = None, False
        commit = self._commits.get(base)
        if commit is None:
            return
        way = at - commit.at - held
        if held > 0 and 0 < way < MAX_ROUND_TRIP_SECONDS:
            self.round_trip += self._tuning.smoothing * (way - self.round_trip) if self.round_trip else way
        # A message that only adds siblings counts as one level: they, too, are worth about as much as the best leaf.
        levels = min(max(1, deepest - commit.deepest), MAX_LEVELS)
        if commit.last is None:
            self._first.learn(at - commit.at, levels, self._tuning.smoothing)
        else:
            self._next.learn(at - commit.last, levels, self._tuning.smoothing)
        commit.last, commit.deepest = at, max(commit.deepest, deepest)

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
        commit = self._commits[base]
        since, message = (commit.at, self._first) if commit.last is None else (commit.last, self._next)
        until = min(since + 2 * message.seconds, commit.at + patience)
        gain = self._gain(leaf, break_even, message.levels)
        if self._given_up or now >= until or gain <= 0:
            return WaitEstimate(expected)
        self._awaited = until
        # An overdue message is expected at any moment; the lower bound avoids a division by zero.
        return WaitEstimate(expected, gain / max(since + message.seconds - now, 1e-4), until)

    def _gain(self, leaf: float, break_even: float, levels: float) -> float:
        """Return the expected tokens from a chain of candidates below the best leaf, less what their rows cost. Levels
        that cost more than they bring are not verified."""
        gain = 0.0
        while levels > 0:
            leaf *= self._acceptance
            if leaf <= break_even:
                break
            gain += min(levels, 1.0) * (leaf - break_even)
            levels -= 1
        return gain

    def _give_up(self, base: int, now: float) -> None:
        """Stop waiting; the time waited is a lower bound for the time of the awaited message."""
        self._awaited, self._given_up = None, True
        commit = self._commits[base]
        if commit.last is None:
            self._first.seconds = max(self._first.seconds, now - commit.at)
        else:
            self._next.seconds = max(self._next.seconds, now - commit.last)


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
