"""Is it worth proposing? Tokens a second are measured with proposals and without, as they come out, and what brings
more is used; the other is tried again from time to time, more rarely each time that it brings less, and at once where
what is used comes to bring less than the other did.

Whether candidates pay depends on how many texts share a step, so batches are told apart by size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_SECONDS = 1.0
"""Seconds of steps in a measurement."""

WARM_UP_SECONDS = 0.2
"""Seconds after a change that are not measured: drafts catch up, or finish."""

FIRST_PAUSE, LONGEST_PAUSE = 5.0, 160.0
"""Seconds of steps until what brought less is tried again: the first time, and at most."""

CLEARLY = 1.05
"""How many times as much it must bring to be used from then on."""

NOTICED = 2
"""Measurements in a row in which what is used must bring less than the other did for that to be tried at once: a single
one may be noise."""

IDLE_SECONDS = 1.0
"""Seconds between two steps from which on nothing was to be done between them."""


@dataclass
class _Size:
    """The measurements of batches of about one size."""

    best: bool = True  # with proposals
    trial: bool = False  # the other is being tried
    rates: dict[bool, float] = field(default_factory=dict)  # tokens a second
    clock: float = 0.0  # seconds of steps
    next_trial: float = 0.0
    pause: float = FIRST_PAUSE
    behind: int = 0  # measurements in a row in which what is used brought less than the other did
    warm_up: float = WARM_UP_SECONDS
    tokens: int = 0  # of the measurement under way
    seconds: float = 0.0

    @property
    def proposes(self) -> bool:
        return self.best is not self.trial

    def add(self, tokens: int, seconds: float) -> None:
        self.clock += seconds
        if self.warm_up > 0:
            self.warm_up -= seconds
            return
        self.tokens, self.seconds = self.tokens + tokens, self.seconds + seconds
        if self.seconds >= WINDOW_SECONDS:
            self._end_window()

    def _end_window(self) -> None:
        before, rate = self.proposes, self.tokens / self.seconds
        self.tokens, self.seconds = 0, 0.0
        self.rates[before] = rate
        if self.trial:
            self.trial = False
            if rate > CLEARLY * self.rates[self.best]:
                self.best, self.pause = before, FIRST_PAUSE
            else:
                self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.next_trial = self.clock + self.pause
            self.behind = 0
        else:
            self.behind = self.behind + 1 if CLEARLY * rate < self.rates.get(not before, 0.0) else 0
            self.trial = self.clock >= self.next_trial or self.behind >= NOTICED
        self.warm_up = 0.0 if self.proposes is before else WARM_UP_SECONDS


class Worth:
    """The measurements of one vLLM engine."""

    def __init__(self) -> None:
        self._sizes: dict[int, _Size] = {}
        self._last: tuple[int, float] | None = None  # texts and time of the last step

    def after_step(self, texts: int, tokens: int, now: float) -> bool:
        """Count a step that has just given `tokens` tokens to so many texts; return whether to propose candidates for
        the next one. A step that began after a pause, or with other texts, is not measured."""
        size = self._sizes.setdefault((texts - 1).bit_length(), _Size())
        if self._last is not None:
            before, then = self._last
            if before == texts and now - then < IDLE_SECONDS:
                size.add(tokens, now - then)
        self._last = texts, now
        return size.proposes
