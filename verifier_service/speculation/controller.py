"""Adaptive speculation: measures what each mode brings, and uses the best, so that nothing is slower than plain
decoding.

A latency model does not know all that speculation costs: drafts may share the verifier's cores, and messages take the
event loop's time. So the controller measures tokens a second as they come out, by mode and by kind of batch. Batches
differ in size (by powers of two, since speculation brings less the more sessions there are), in what their sessions
allow, and in whether tokens are sampled. The best mode is used; the others are probed from time to time, more rarely
each time that they lose. In the words of bandit algorithms, modes are arms and kinds of batch are contexts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

WINDOW_SECONDS = 0.5
"""Seconds of steps in one measurement, which has MIN_STEPS at least."""

EARLY_STOP_SECONDS, HOPELESS_RATIO = 0.1, 0.8
"""A new mode is given up after so many seconds of steps with candidates if it brings less than this part of the best
rate. Steps without candidates do not count: at the beginning of a text there is nothing to look up, and drafts have to
read the prompt."""

MIN_STEPS = 10
"""Fewer steps say nothing, however long they are."""

WARMUP_SECONDS = 0.1
"""Seconds after a change of mode that are not measured: drafts have to hear of it, and catch up with the text."""

MIN_IMPROVEMENT = 1.05
"""A probed mode replaces the best one if its rate is higher by this factor."""

FIRST_PROBE_PAUSE, LONGEST_PROBE_PAUSE = 1.0, 60.0
"""Seconds of steps between two probes of a mode. Idle time does not count: it would make probes a larger part of the
work."""

LINGER_SECONDS = 1.0
"""Sessions that have left count for so long: often others follow. To wake the drafts for the last steps of a few
sessions, and to stop them again, would cost more than it brings."""

PROBE_BUDGET = 0.05
"""Share of all tokens that probes of one mode may cost: a probe that lost much is followed by a longer pause."""


class Mode(Enum):
    """The candidates that a step verifies."""

    OFF = "off"
    """None: one token a step."""
    NGRAM = "ngram"
    """Candidates that the verifier finds without a model: n-grams of the text and lookahead windows."""
    LOCAL_DRAFT = "local_draft"
    """The candidates of NGRAM, and those of a draft model in the verifier's process."""
    REMOTE_DRAFT = "remote_draft"
    """The candidates of NGRAM, and those of draft services."""


@dataclass
class Probe:
    """The next probe of a mode: when it is, and how long the mode then pauses if it loses again. Seconds of steps."""

    at: float = 0.0
    pause: float = FIRST_PROBE_PAUSE


@dataclass
class ModeStats:
    """Statistics of the modes for one kind of batch, and the measurement under way."""

    best: Mode  # as far as is known
    probes: dict[Mode, Probe]  # of all other modes
    rates: dict[Mode, float] = field(default_factory=dict)  # tokens a second of the modes measured so far
    probing: Mode | None = None  # the mode that is being probed
    clock: float = 0.0  # seconds of steps
    warmup: float = 0.0  # seconds left of it
    tokens: int = 0  # of the measurement under way
    seconds: float = 0.0
    steps: int = 0
    speculated: int = 0  # steps of it that had candidates
    speculated_seconds: float = 0.0

    @property
    def mode(self) -> Mode:
        """The mode to use now."""
        return self.probing or self.best

    def update(self, tokens: int, seconds: float, plain_rate: float, *, speculated: bool) -> None:
        """Add a step in the current mode. `speculated`: it had candidates."""
        self.clock += seconds
        if self.warmup > 0:
            self.warmup -= seconds
            return
        self.tokens += tokens
        self.seconds += seconds
        self.steps += 1
        self.speculated += speculated
        self.speculated_seconds += speculated * seconds
        long_enough = self.seconds >= WINDOW_SECONDS and self.steps >= MIN_STEPS
        if long_enough or (self._conclusive and self._hopeless(plain_rate)):
            before = self.mode
            self._end_window(plain_rate)
            self.warmup = WARMUP_SECONDS if self.mode is not before else 0.0

    @property
    def _conclusive(self) -> bool:
        """True if enough steps had candidates to say something about the mode."""
        return self.speculated >= MIN_STEPS and self.speculated_seconds >= EARLY_STOP_SECONDS

    def _hopeless(self, plain_rate: float) -> bool:
        """True if a mode that was not measured before has no chance, by what it has brought so far."""
        if self.probing is None and self.rates:
            return False
        return self.tokens < HOPELESS_RATIO * max(self.rates.get(self.best, 0.0), plain_rate) * self.seconds

    def _end_window(self, plain_rate: float) -> None:
        """End the measurement: note the rate of its mode, and decide which mode is next."""
        rate, first, conclusive = self.tokens / self.seconds, not self.rates, self._conclusive
        seconds = WARMUP_SECONDS + self.seconds
        self.tokens, self.seconds, self.steps, self.speculated, self.speculated_seconds = 0, 0.0, 0, 0, 0.0
        before = self.rates.get(self.best, rate) if self.probing is None else rate  # an old probe's rate says nothing
        self.rates[self.mode] = before + 0.5 * (rate - before)
        disappoints = conclusive and self.rates[self.best] < plain_rate
        if first and not disappoints:  # the first mode does well: the others can wait
            for probe in self.probes.values():
                probe.at = self.clock + probe.pause
        if self.probing is not None:
            self._finish_probe(self.probing, seconds)
        due = [mode for mode, probe in self.probes.items() if self.clock >= probe.at]
        if not disappoints and Mode.OFF not in self.rates and Mode.OFF in due:
            due.remove(Mode.OFF)  # while speculation beats the upper bound of plain decoding, that is not probed
        self.probing = min(due, key=lambda mode: self.probes[mode].at, default=None)

    def _finish_probe(self, probed: Mode, seconds: float) -> None:
        """Take a probed mode as the best one, or plan its next probe. The probe took so many `seconds`."""
        probe = self.probes[probed]
        if self.rates[probed] > MIN_IMPROVEMENT * self.rates[self.best]:
            del self.probes[probed]
            self.probes[self.best] = Probe(self.clock + FIRST_PROBE_PAUSE)
            self.best = probed
        else:
            lost = seconds * (1.0 - self.rates[probed] / self.rates[self.best])
            pause = max(probe.pause, lost / PROBE_BUDGET)
            probe.at = self.clock + pause
            probe.pause = min(2 * pause, LONGEST_PROBE_PAUSE)


class BatchProfile(NamedTuple):
    """A batch profile: all that decides which mode is best for the sessions of a step."""

    sessions: int
    remote_draft: bool  # some sessions have a draft
    ngram: bool  # some sessions take the verifier's own candidates
    sampled: bool  # most tokens are sampled: greedy ones are predicted far more easily
    local_draft: bool = False  # the verifier has a draft model

    @property
    def modes(self) -> list[Mode]:
        """The modes that the sessions allow, the most promising first."""
        own = [Mode.LOCAL_DRAFT] * self.local_draft + [Mode.NGRAM] if self.ngram else []
        return [Mode.REMOTE_DRAFT] * self.remote_draft + own + [Mode.OFF]


class SpeculationController:
    """Selects the mode of every step, and is told what each step brought."""

    def __init__(self) -> None:
        self._stats: dict[BatchProfile, ModeStats] = {}
        self._mode = Mode.REMOTE_DRAFT
        self._held = 0  # sessions of the present kind of batch, or of a larger one of late
        self._seen = 0.0  # when there were so many

    @property
    def mode(self) -> Mode:
        """The mode of the coming step. Where no session has a draft, REMOTE_DRAFT means NGRAM."""
        return self._mode

    def mode_for(self, batch: BatchProfile, now: float) -> Mode:
        """The mode that such a batch would get. Changes nothing: any thread may ask."""
        kind = _kind(batch)
        if now - self._seen <= LINGER_SECONDS:
            kind = self._at_least(kind)
        known = self._stats.get(kind)
        return known.mode if known is not None else self._likely(kind)

    def select(self, batch: BatchProfile, now: float) -> None:
        """Select the mode for the next step of this batch. Steps that contain prefill select a mode as well, and do not
        update the statistics."""
        kind = _kind(batch)
        if kind.sessions >= self._held or now - self._seen > LINGER_SECONDS:
            self._held, self._seen = kind.sessions, now
        self._mode = self._of(self._at_least(kind)).mode

    def update(self, batch: BatchProfile, *, speculated: bool, tokens: int, seconds: float, plain_rate: float) -> None:
        """Add what a step brought.

        `tokens`: committed by it; `seconds`: since the step before it ended or, if there was nothing to do in between,
        since it began; `speculated`: it had candidates; `plain_rate`: tokens a second that plain decoding could bring
        at most. It is an upper bound, since the time between two steps also counts against plain decoding.

        A measurement goes on where it stopped when such a batch comes again.
        """
        kind = _kind(batch)
        known = self._of(kind)
        if known.mode is self._mode:  # else the step was planned for other sessions
            known.update(tokens, seconds, plain_rate, speculated=speculated)
        self._mode = self._of(self._at_least(kind)).mode

    def _at_least(self, kind: BatchProfile) -> BatchProfile:
        """The kind of batch with the sessions that have just left."""
        return kind._replace(sessions=max(kind.sessions, self._held))

    def _of(self, kind: BatchProfile) -> ModeStats:
        known = self._stats.get(kind)
        if known is None:
            best = self._likely(kind)
            known = self._stats[kind] = ModeStats(best, {mode: Probe() for mode in kind.modes if mode is not best})
        return known

    def _likely(self, kind: BatchProfile) -> Mode:
        """The mode for the first batch of a kind: that of the next larger batch, which some sessions have just left, or
        of the nearest smaller one, since speculation brings no more where there are more sessions. Where only much
        larger batches are known, the most promising mode is tried; whether it pays is soon seen."""
        sizes = (kind.sessions + 1, *reversed(range(kind.sessions)))
        near = (self._stats.get(kind._replace(sessions=size)) for size in sizes)
        return next((known.best for known in near if known is not None), kind.modes[0])


def _kind(batch: BatchProfile) -> BatchProfile:
    """The kind of a batch: `sessions` is rounded up to a power of two and given as its exponent. A batch of 64 is of
    one kind with what is left of it when the first sessions have ended."""
    return batch._replace(sessions=(batch.sessions - 1).bit_length())
