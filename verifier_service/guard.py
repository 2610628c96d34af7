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
    trying: bool = False  # the other one, now
    pause: float = FIRST_PAUSE
    try_at: float = 0.0  # when the other way is tried again
    settling: float = 0.0  # seconds left of it
    tokens: int = 0  # of the measurement under way
    seconds: float = 0.0

    @property
    def way(self) -> bool:
        """Whether to speculate now."""
        return self.speculate is not self.trying

    def observe(self, now: float, tokens: int, seconds: float, plain_rate: float) -> None:
        """A step was made in its way."""
        if self.settling > 0:
            self.settling -= seconds
            return
        self.tokens += tokens
        self.seconds += seconds
        if self.seconds >= EPOCH:
            before = self.way
            self._conclude(now, plain_rate)
            self.settling = SETTLING if self.way is not before else 0.0

    def _conclude(self, now: float, plain_rate: float) -> None:
        """An epoch is over: what it says of its way, and which is next."""
        rate = self.tokens / self.seconds
        self.tokens, self.seconds = 0, 0.0
        before = self.rates[self.way]
        self.rates[self.way] = rate if before is None else before + 0.5 * (rate - before)
        mine, other = self.rates[self.speculate], self.rates[not self.speculate]
        assert mine is not None
        if self.trying:
            assert other is not None
            self.trying = False
            self._judge(now, other > BETTER * mine)
        elif other is None:  # plain decoding: as long as speculation beats what is expected of it, it need not be tried
            self.trying = mine < plain_rate
        else:
            self.trying = now >= self.try_at

    def _judge(self, now: float, better: bool) -> None:
        """The other way has been measured."""
        if better:
            self.speculate = not self.speculate
            self.pause = FIRST_PAUSE
        else:
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
        self.try_at = now + self.pause


class Guard:
    """Told of every step; times are those of `time.monotonic`."""

    def __init__(self) -> None:
        self._experience: dict[int, Experience] = {}
        self._speculating = True

    @property
    def speculating(self) -> bool:
        """Whether candidates are verified and waited for, as decided after the last step."""
        return self._speculating

    def observe(self, now: float, *, sessions: int, tokens: int, seconds: float, plain_rate: float) -> None:
        """A step of `sessions` that could have speculated brought `tokens`, `seconds` after the step before it or,
        if there was nothing to do, after its start. `plain_rate` is what plain decoding is expected to bring.

        A measurement goes on where it was left when there are as many sessions again."""
        known = self._experience.setdefault(sessions.bit_length(), Experience())
        if known.way is self._speculating:  # else it was planned for another number of sessions
            known.observe(now, tokens, seconds, plain_rate)
        self._speculating = known.way
