"""Never slower than plain decoding: whether to speculate at all, by what it brings.

What speculation costs is not only what the cost model knows: drafts may share the verifier's cores, messages take
the event loop's time. So tokens a second are measured as they come out, with candidates and without, for each
number of sessions (by powers of two, since the more there are, the less speculation brings), and the better of the
two goes on. The other is tried again now and then, less often each time that it loses.
"""

from __future__ import annotations

from dataclasses import dataclass, field

EPOCH = 0.5
"""Seconds of steps that make a measurement."""

SETTLING = 0.05
"""Seconds after a change that are not measured: drafts have to hear of it."""

BETTER = 1.1
"""By so much the other way must be better to be taken."""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds until the other way is tried again."""


@dataclass
class Experience:
    """With one number of sessions. Tokens a second; None: never measured."""

    rates: dict[bool, float | None] = field(default_factory=lambda: {True: None, False: None})
    speculate: bool = True  # the better way, as far as is known
    pause: float = FIRST_PAUSE
    try_at: float = 0.0  # when the other way is tried again


class Guard:
    """Told of every step; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._experience: dict[int, Experience] = {}
        self._sessions = 0  # class of the running measurement
        self._speculating = True
        self._settling = 0.0  # seconds left of it
        self._tokens = 0
        self._seconds = 0.0

    @property
    def speculating(self) -> bool:
        """Whether candidates are verified and waited for now."""
        return self._speculating

    def observe(self, now: float, *, sessions: int, tokens: int, seconds: float, plain_rate: float) -> None:
        """A step of `sessions` that could have speculated brought `tokens`, `seconds` after the step before it or,
        if there was nothing to do, after its start. `plain_rate` is what plain decoding is expected to bring."""
        if sessions.bit_length() != self._sessions:
            self._sessions = sessions.bit_length()
            known = self._experience.setdefault(self._sessions, Experience())
            self._begin(known.speculate)
        if self._settling > 0:
            self._settling -= seconds
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._seconds >= EPOCH:
            self._conclude(now, plain_rate)

    def _conclude(self, now: float, plain_rate: float) -> None:
        known, way = self._experience[self._sessions], self._speculating
        rate = self._tokens / self._seconds
        before = known.rates[way]
        known.rates[way] = rate if before is None else before + 0.5 * (rate - before)
        trying = way is not known.speculate
        if trying:
            self._judge(known, now)
        mine, other = known.rates[known.speculate], known.rates[not known.speculate]
        if other is None:  # plain decoding: as long as speculation beats what is expected of it, it need not be tried
            assert mine is not None
            try_other = mine < plain_rate
        else:
            try_other = not trying and now >= known.try_at
        self._begin(known.speculate is not try_other)

    def _judge(self, known: Experience, now: float) -> None:
        """The other way has been measured."""
        mine, other = known.rates[known.speculate], known.rates[not known.speculate]
        assert mine is not None
        assert other is not None
        if other > BETTER * mine:
            known.speculate = not known.speculate
            known.pause = FIRST_PAUSE
        else:
            known.pause = min(2 * known.pause, LONGEST_PAUSE)
        known.try_at = now + known.pause

    def _begin(self, speculating: bool) -> None:
        if speculating is not self._speculating:
            self._settling = SETTLING
        self._speculating = speculating
        self._tokens, self._seconds = 0, 0.0
