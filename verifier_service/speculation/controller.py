"""Adaptive speculation: measures what each mode brings, and uses the best, so that nothing is slower than plain
decoding.

A latency model does not know all that speculation costs: drafts may share the verifier's cores, and messages take the
event loop's time. So the controller measures tokens a second as they come out, by mode and by kind of batch. Batches
differ in size (by powers of two, since speculation brings less the more sessions there are), in what their sessions
allow, in whether tokens are sampled, and in how many sessions are exempt: these speculate whatever the mode is, so that
their rows are a cost of every mode alike, and their tokens are no merit of any. The best mode is used; the others are
probed from time to time, more rarely each time that they lose. In the words of bandit algorithms, modes are arms and
kinds of batch are contexts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from verifier_service.settings.tuning import DEFAULTS, ControllerTuning


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

    at: float
    pause: float


@dataclass
class ModeStats:
    """Statistics of the modes for one kind of batch, and the measurement under way."""

    tuning: ControllerTuning
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
        long_enough = self.seconds >= self.tuning.window_seconds and self.steps >= self.tuning.min_steps
        if long_enough or (self._conclusive and self._hopeless(plain_rate)):
            before = self.mode
            self._end_window(plain_rate)
            self.warmup = self.tuning.warmup_seconds if self.mode is not before else 0.0

    @property
    def _conclusive(self) -> bool:
        """True if enough steps had candidates to say something about the mode."""
        return self.speculated >= self.tuning.min_steps and self.speculated_seconds >= self.tuning.early_stop_seconds

    def _hopeless(self, plain_rate: float) -> bool:
        """True if a mode that was not measured before has no chance, by what it has brought so far."""
        if self.probing is None and self.rates:
            return False
        return self.tokens < self.tuning.hopeless_ratio * max(self.rates.get(self.best, 0.0), plain_rate) * self.seconds

    def _end_window(self, plain_rate: float) -> None:
        """End the measurement: note the rate of its mode, and decide which mode is next."""
        rate, first, conclusive = self.tokens / self.seconds, not self.rates, self._conclusive
        seconds = self.tuning.warmup_seconds + self.seconds
        self.tokens, self.seconds, self.steps, self.speculated, self.speculated_seconds = 0, 0.0, 0, 0, 0.0
        before = self.rates.get(self.best, rate) if self.probing is None else rate  # an old probe's rate says nothing
        self.rates[self.mode] = before + 0.5 * (rate - before)
        # A second window counts however few candidates there were: those of a poor draft are not worth a row, and yet
        # steps are delayed for it.
        disappoints = (conclusive or not first) and self.rates[self.best] < plain_rate
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
        if self.rates[probed] > self.tuning.min_improvement * self.rates[self.best]:
            del self.probes[probed]
            first_pause = self.tuning.first_probe_pause
            self.probes[self.best] = Probe(self.clock + first_pause, first_pause)
            self.best = probed
        else:
            lost = seconds * (1.0 - self.rates[probed] / self.rates[self.best])
            pause = max(probe.pause, lost / self.tuning.probe_budget)
            probe.at = self.clock + pause
            probe.pause = min(2 * pause, self.tuning.longest_probe_pause)


class BatchProfile(NamedTuple):
    """A batch profile: all that decides which mode is best for the sessions of a step that it is selected for."""

    sessions: int  # without those that are exempt
    remote_draft: bool  # some sessions have a draft
    ngram: bool  # some sessions take the verifier's own candidates
    sampled: bool  # most tokens are sampled: greedy ones are predicted far more easily
    local_draft: bool = False  # the verifier has a draft model
    exempt: int = 0  # sessions in the same step that the mode does not decide for

    @property
    def of_step(self) -> int:
        """The number of all sessions of the step."""
        return self.sessions + self.exempt

    @property
    def modes(self) -> list[Mode]:
        """The modes that the sessions allow, the most promising first."""
        own = [Mode.LOCAL_DRAFT] * self.local_draft + [Mode.NGRAM] if self.ngram else []
        return [Mode.REMOTE_DRAFT] * self.remote_draft + own + [Mode.OFF]


class Lingering:
    """A number of sessions, and those that have just left: often others follow."""

    def __init__(self, seconds: float) -> None:
        self.held = 0  # sessions now, or more of late
        self._seconds = seconds
        self._seen = 0.0  # when there were so many

    def see(self, sessions: int, now: float) -> None:
        """Note how many there are now."""
        if sessions >= self.held or not self.lasts(now):
            self.held, self._seen = sessions, now

    def lasts(self, now: float) -> bool:
        """Return True if there were as many as `held` until just now."""
        return now - self._seen <= self._seconds


class SpeculationController:
    """Selects the mode of every step, and is told what each step brought."""

    def __init__(self, tuning: ControllerTuning = DEFAULTS.controller) -> None:
        self._tuning = tuning
        self._stats: dict[BatchProfile, ModeStats] = {}
        self._mode = Mode.REMOTE_DRAFT
        # Of the kinds of batch of late.
        self._sessions = Lingering(tuning.linger_seconds)
        self._exempt = Lingering(tuning.linger_seconds)

    @property
    def mode(self) -> Mode:
        """The mode of the coming step. Where no session has a draft, REMOTE_DRAFT means NGRAM."""
        return self._mode

    def mode_for(self, batch: BatchProfile, now: float) -> Mode:
        """The mode that such a batch would get. Changes nothing: any thread may ask."""
        kind = _kind(batch)
        if self._exempt.lasts(now):
            kind = self._beside_exempt(kind)
        if self._sessions.lasts(now):
            kind = self._at_least(kind)
        stats = self._stats.get(kind)
        return stats.mode if stats is not None else self._likely(kind)

    def select(self, batch: BatchProfile, now: float) -> None:
        """Select the mode for the next step of this batch. Steps that contain prefill select a mode as well, and do not
        update the statistics."""
        kind = _kind(batch)
        self._sessions.see(kind.sessions, now)
        self._exempt.see(kind.exempt, now)
        self._mode = self._of(self._at_least(self._beside_exempt(kind))).mode

    def update(self, batch: BatchProfile, *, speculated: bool, tokens: int, seconds: float, plain_rate: float) -> None:
        """Add what a step brought.

        `tokens`: committed by it, without those of exempt sessions; `seconds`: since the step before it ended or, if
        there was nothing to do in between, since it began; `speculated`: it had candidates of others than these;
        `plain_rate`: tokens a second that plain decoding could bring at most. It is an upper bound, since the time
        between two steps also counts against plain decoding.

        A measurement goes on where it stopped when such a batch comes again.
        """
        kind = self._beside_exempt(_kind(batch))
        stats = self._of(kind)
        if stats.mode is self._mode:  # else the step was planned for other sessions
            stats.update(tokens, seconds, plain_rate, speculated=speculated)
        self._mode = self._of(self._at_least(kind)).mode

    def _at_least(self, kind: BatchProfile) -> BatchProfile:
        """The kind of batch with the sessions that have just left."""
        return kind._replace(sessions=max(kind.sessions, self._sessions.held))

    def _beside_exempt(self, kind: BatchProfile) -> BatchProfile:
        """The kind of batch with the exempt sessions that there are or have just been: those that sit out steps, as
        under CONTRASTIVE while a draft is late, make no other kind of every other step."""
        return kind._replace(exempt=max(kind.exempt, self._exempt.held))

    def _of(self, kind: BatchProfile) -> ModeStats:
        stats = self._stats.get(kind)
        if stats is None:
            best, first_pause = self._likely(kind), self._tuning.first_probe_pause
            probes = {mode: Probe(0.0, first_pause) for mode in kind.modes if mode is not best}
            stats = self._stats[kind] = ModeStats(self._tuning, best, probes)
        return stats

    def _likely(self, kind: BatchProfile) -> Mode:
        """The mode for the first batch of a kind: that of the next larger batch, which some sessions have just left, or
        of the nearest smaller one, since speculation brings no more where there are more sessions. Where only much
        larger batches are known, the most promising mode is tried; whether it pays is soon seen. Where no batch with
        so many exempt sessions is known, one with fewer says what to begin with."""
        sizes = (kind.sessions, kind.sessions + 1, *reversed(range(kind.sessions)))
        others = reversed(range(kind.exempt + 1))
        neighbours = (kind._replace(sessions=size, exempt=exempt) for exempt in others for size in sizes)
        known = (self._stats[each].best for each in neighbours if each in self._stats)
        return next(known, kind.modes[0])


def _kind(batch: BatchProfile) -> BatchProfile:
    """The kind of a batch: numbers of sessions are rounded up to a power of two, and given as exponents (`exempt` as
    one more, since it may be 0). A batch of 64 is of one kind with what is left of it when the first sessions have
    ended."""
    exempt = 1 + (batch.exempt - 1).bit_length() if batch.exempt else 0
    return batch._replace(sessions=(batch.sessions - 1).bit_length(), exempt=exempt)
