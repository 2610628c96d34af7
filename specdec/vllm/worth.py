"""Decides whether proposing pays, by measuring throughput with and without proposals. The better alternative is used.
The other is retried after a back-off that doubles with every defeat, or immediately if throughput falls below its last
result.

Whether candidates pay depends on the number of texts in a step, so batches are measured by size.
"""

from __future__ import annotations

from dataclasses import dataclass, field

WINDOW_SECONDS = 1.0
"""Length of a measurement in seconds of steps."""

WARM_UP_SECONDS = 0.2
"""Seconds after a change that are not measured, because drafts still catch up or finish."""

FIRST_PAUSE, MAX_PAUSE = 5.0, 160.0
"""Initial and maximum back-off before retrying the worse alternative, in seconds of steps."""

CLEARLY = 1.05
"""Factor by which the other alternative must be faster to replace the one in use, or to be tried at once."""

NOTICED = 2
"""Consecutive measurements clearly below the other alternative's last result that trigger its immediate trial: a single
one may be noise."""


@dataclass
class _Size:
    """The measurements for batches of about the same size."""

    best: bool = True  # whether proposing is the better alternative
    trial: bool = False  # the other alternative is on trial
    rates: dict[bool, float] = field(default_factory=dict)  # tokens a second
    clock: float = 0.0  # seconds of steps
    next_trial: float = 0.0
    pause: float = FIRST_PAUSE
    behind: int = 0  # consecutive measurements clearly below the other's last result
    warm_up: float = WARM_UP_SECONDS
    tokens: int = 0  # of the current measurement
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
                self.pause = min(2 * self.pause, MAX_PAUSE)
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

    def after_step(self, texts: int, tokens: int, now: float, *, continues: bool) -> bool:
        """Record a step with `tokens` tokens for `texts` texts; return whether to propose candidates for the next one.
        A step is not measured after a step with another number of texts, or if it `continues` no text: the engine may
        have been idle before it."""
        size = self._sizes.setdefault((texts - 1).bit_length(), _Size())
        if self._last is not None:
            before, then = self._last
            if before == texts and continues:
                size.add(tokens, now - then)
        self._last = texts, now
        return size.proposes
