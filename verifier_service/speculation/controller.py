"""Adaptive speculation: measures the token rate of each mode and uses the best, so that speculation is never slower
than plain decoding.

A latency model misses part of the cost of speculation: drafts may share the verifier's cores, and messages occupy the
event loop. So the controller measures committed tokens a second, by mode and by kind of batch: a contextual bandit with
modes as arms and kinds of batch as contexts. It explores by probes with exponential back-off: the other modes are
measured occasionally, less often after every loss.

Kinds of batch differ in size (a power of two; speculation gains less with more sessions), in the drafters that their
sessions permit, in whether tokens are sampled, and in the number of exempt sessions. These are sessions of other
groups, and sessions that speculate in every mode: their rows cost all modes the same, and their tokens are credited to
none.

Acceptance depends on the text and its tenant, so a pod has a controller for each group of texts with similar
acceptance. One tenant's texts must not decide another's modes: each tenant's modes are measured separately, by its own
tokens over the time of whole steps. For the same reason, texts with unhelpful drafts are separate from the tenant's
other texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from verifier_service.backend.result import Mode
from verifier_service.sessions.session import VerifierSession
from verifier_service.settings.tuning import DEFAULTS, ControllerTuning

STALL = 40.0
"""Cap on the seconds of a step, relative to plain decoding of its tokens: in a longer one, the process stood still. In
a probe, such a step would postpone the next probe for hours."""


@dataclass
class Probe:
    """The next probe of a mode: its time, and the pause after it if the mode loses again. Both are in seconds spent in
    steps (`ModeStats.clock`)."""

    at: float
    pause: float


@dataclass
class ModeStats:
    """Statistics of the modes for one kind of batch, and the measurement in progress."""

    tuning: ControllerTuning
    best: Mode  # by the measurements so far
    probes: dict[Mode, Probe]  # of all other modes
    rates: dict[Mode, float] = field(default_factory=dict)  # tokens a second of the modes measured so far
    reported_rates: Mapping[str, float] | None = None  # `rates` by mode name; never modified, only replaced
    probing: Mode | None = None  # the mode under probe
    clock: float = 0.0  # seconds of steps
    warmup: float = 0.0  # seconds left
    tokens: int = 0  # of the measurement in progress
    seconds: float = 0.0
    steps: int = 0
    speculated: int = 0  # its steps with candidates or other costs of speculation
    speculated_seconds: float = 0.0

    @property
    def mode(self) -> Mode:
        """The mode to use now."""
        return self.probing or self.best

    def update(self, tokens: int, seconds: float, plain_rate: float, *, speculated: bool) -> None:
        """Add a step in the current mode; `speculated`: it had candidates or other costs of speculation."""
        seconds = min(seconds, STALL * max(1, tokens) / plain_rate)
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
        """True if enough steps speculated to judge the mode."""
        return self.speculated >= self.tuning.min_steps and self.speculated_seconds >= self.tuning.early_stop_seconds

    def _hopeless(self, plain_rate: float) -> bool:
        """True if the probed mode, or the very first one, is far below the larger of best and plain rate."""
        if self.probing is None and self.rates:
            return False
        return self.tokens < self.tuning.hopeless_ratio * max(self.rates.get(self.best, 0.0), plain_rate) * self.seconds

    def _end_window(self, plain_rate: float) -> None:
        """End the measurement: record the mode's rate, and decide on the next mode."""
        rate, first, conclusive = self.tokens / self.seconds, not self.rates, self._conclusive
        seconds = self.tuning.warmup_seconds + self.seconds
        self.tokens, self.seconds, self.steps, self.speculated, self.speculated_seconds = 0, 0.0, 0, 0, 0.0
        before = self.rates.get(self.best, rate) if self.probing is None else rate  # at a probe, the old rate is stale
        self.rates[self.mode] = before + 0.5 * (rate - before)
        self.reported_rates = {mode.value: measured for mode, measured in self.rates.items()}
        # A second measurement counts even if few steps had candidates: a poor draft delays steps although its
        # candidates are not worth their rows.
        disappoints = (conclusive or not first) and self.rates[self.best] < plain_rate
        if first and not disappoints:  # the first mode does well: postpone all probes
            for probe in self.probes.values():
                probe.at = self.clock + probe.pause
        if self.probing is not None:
            self._finish_probe(self.probing, seconds)
        due = [mode for mode, probe in self.probes.items() if self.clock >= probe.at]
        if not disappoints and Mode.OFF not in self.rates and Mode.OFF in due:
            due.remove(Mode.OFF)  # no probe while speculation beats OFF's upper bound
        self.probing = min(due, key=lambda mode: self.probes[mode].at, default=None)

    def _finish_probe(self, probed: Mode, seconds: float) -> None:
        """Make a probed mode the best one, or schedule its next probe; the probe took `seconds`."""
        probe = self.probes[probed]
        # A clear improvement is required: with noise alone, equal modes would alternate.
        if self.rates[probed] > self.tuning.min_improvement * self.rates[self.best]:
            del self.probes[probed]
            first_pause = self.tuning.first_probe_pause
            self.probes[self.best] = Probe(self.clock + first_pause, first_pause)
            self.best = probed
        else:
            # Bound the regret: seconds lost in the probe are at most `probe_budget` of the time until the next one.
            lost = seconds * (1.0 - self.rates[probed] / self.rates[self.best])
            pause = max(probe.pause, lost / self.tuning.probe_budget)
            probe.at = self.clock + pause
            probe.pause = min(2 * pause, self.tuning.longest_probe_pause)


class BatchProfile(NamedTuple):
    """A batch profile, the context of the bandit: everything that decides which mode is best for these sessions."""

    sessions: int  # without exempt ones
    remote_draft: bool  # some sessions have a draft
    ngram: bool  # some sessions take the verifier's own candidates
    sampled: bool  # most tokens are sampled: greedy ones are far easier to predict
    local_model: Mode | None = None  # the mode of the verifier's draft model or heads, if some sessions permit them
    exempt: int = 0  # other sessions in the same step, not governed by the mode

    @property
    def of_step(self) -> int:
        """The number of all sessions of the step."""
        return self.sessions + self.exempt

    @property
    def modes(self) -> list[Mode]:
        """The modes permitted by the sessions, the most promising first."""
        by_model = [] if self.local_model is None else [self.local_model]
        own = [*by_model, Mode.NGRAM] if self.ngram else []
        return [Mode.REMOTE_DRAFT] * self.remote_draft + own + [Mode.OFF]


class Lingering:
    """A session count that falls with a delay: departed sessions still count, since others often leave soon after."""

    def __init__(self, seconds: float) -> None:
        self.held = 0  # current number, or a recent larger one
        self._seconds = seconds
        self._seen = 0.0  # last time with this number

    def see(self, sessions: int, now: float) -> None:
        """Record the current number of sessions."""
        if sessions >= self.held or not self.lasts(now):
            self.held, self._seen = sessions, now

    def lasts(self, now: float) -> bool:
        """Return True if the number of sessions last equalled `held` at most the configured seconds ago."""
        return now - self._seen <= self._seconds


class SpeculationController:
    """Selects the mode of every step and is updated with the step's outcome."""

    def __init__(self, tuning: ControllerTuning = DEFAULTS.controller) -> None:
        self._tuning = tuning
        self._stats: dict[BatchProfile, ModeStats] = {}
        self._mode = Mode.REMOTE_DRAFT
        self.probing = False
        """True if the mode is tried to measure it, not because it is the best one so far."""
        self.rates: Mapping[str, float] | None = None
        """Tokens a second by mode, as last measured for batches like the last one. The mapping is never modified, only
        replaced."""
        # Recent session counts, as exponents (see `_kind`).
        self._sessions = Lingering(tuning.linger_seconds)
        self._exempt = Lingering(tuning.linger_seconds)

    @property
    def mode(self) -> Mode:
        """The mode of the coming step. If no session has a draft, REMOTE_DRAFT means NGRAM."""
        return self._mode

    def mode_for(self, batch: BatchProfile, now: float) -> Mode:
        """Return the mode this batch would get. No side effects; thread-safe."""
        kind = _kind(batch)
        if self._exempt.lasts(now):
            kind = self._beside_exempt(kind)
        if self._sessions.lasts(now):
            kind = self._at_least(kind)
        stats = self._stats.get(kind)
        return stats.mode if stats is not None else self._likely(kind)

    def select(self, batch: BatchProfile, now: float) -> None:
        """Select the mode for the next step of this batch. Steps with prefill select a mode too, but do not update the
        statistics."""
        kind = _kind(batch)
        self._sessions.see(kind.sessions, now)
        self._exempt.see(kind.exempt, now)
        self._use(self._at_least(self._beside_exempt(kind)))

    def update(self, batch: BatchProfile, *, speculated: bool, tokens: int, seconds: float, plain_rate: float) -> None:
        """Add the outcome of a step.

        `tokens`: the tokens committed by the step; `speculated`: the step had candidates or other costs of speculation.
        Both exclude exempt sessions. `seconds` run from the end of the previous step or, after an idle period, from the
        start of this one. `plain_rate` is an upper bound on the tokens a second of plain decoding, since it ignores the
        time between steps.

        An interrupted measurement resumes with the next batch of its kind.
        """
        kind = self._beside_exempt(_kind(batch))
        stats = self._of(kind)
        if stats.mode is self._mode:  # else the step was planned under another kind
            stats.update(tokens, seconds, plain_rate, speculated=speculated)
        self._use(self._at_least(kind))

    def _use(self, kind: BatchProfile) -> None:
        stats = self._of(kind)
        self._mode, self.rates, self.probing = stats.mode, stats.reported_rates, stats.probing is not None

    def _at_least(self, kind: BatchProfile) -> BatchProfile:
        """Return the kind of batch, with just departed sessions counted."""
        return kind._replace(sessions=max(kind.sessions, self._sessions.held))

    def _beside_exempt(self, kind: BatchProfile) -> BatchProfile:
        """Return the kind of batch, with current and just departed exempt sessions counted: sessions that skip steps
        (CONTRASTIVE, draft late) still count, so that the kind does not flip every step."""
        return kind._replace(exempt=max(kind.exempt, self._exempt.held))

    def _of(self, kind: BatchProfile) -> ModeStats:
        stats = self._stats.get(kind)
        if stats is None:
            best, first_pause = self._likely(kind), self._tuning.first_probe_pause
            probes = {mode: Probe(0.0, first_pause) for mode in kind.modes if mode is not best}
            stats = self._stats[kind] = ModeStats(self._tuning, best, probes)
        return stats

    def _likely(self, kind: BatchProfile) -> Mode:
        """Return the initial mode for a new kind of batch.

        It is the best mode of the next larger size (sessions may just have left such a batch), else of the nearest
        smaller size: speculation gains no more with more sessions. If neither size is known with this number of exempt
        sessions, smaller numbers are tried. If no such kind is known, it is the most promising mode, which is measured
        soon.
        """
        sizes = (kind.sessions, kind.sessions + 1, *reversed(range(kind.sessions)))
        others = reversed(range(kind.exempt + 1))
        neighbours = (kind._replace(sessions=size, exempt=exempt) for exempt in others for size in sizes)
        known = (self._stats[neighbour].best for neighbour in neighbours if neighbour in self._stats)
        return next(known, kind.modes[0])


def _kind(batch: BatchProfile) -> BatchProfile:
    """Return the kind of a batch: session counts rounded up to powers of two, as exponents (`exempt` as exponent + 1,
    with 0 for none). A batch of 64 stays in its kind when its first sessions end."""
    exempt = 1 + (batch.exempt - 1).bit_length() if batch.exempt else 0
    return batch._replace(sessions=(batch.sessions - 1).bit_length(), exempt=exempt)


MAX_GROUPS = 256
"""Maximum groups whose statistics are kept; the least recently active group is dropped first. A group takes a few
kilobytes."""


class ControllerGroup(NamedTuple):
    """Texts with a common controller."""

    tenant: str
    drafted: bool  # a remote draft helps them, or is on trial


class Controllers:
    """The controllers, by group. `shared`: a single controller for all texts, if their modes are known or measured
    elsewhere."""

    def __init__(
        self, tuning: ControllerTuning = DEFAULTS.controller, shared: SpeculationController | None = None
    ) -> None:
        self._tuning = tuning
        self._shared = shared
        self._known: OrderedDict[ControllerGroup, SpeculationController] = OrderedDict()

    def of(self, session: VerifierSession) -> SpeculationController:
        """Return the controller of a session, a new one if its group is unknown. No side effects; thread-safe."""
        if self._shared is not None:
            return self._shared
        return self._known.get(_group(session)) or SpeculationController(self._tuning)

    def select(self, sessions: Iterable[VerifierSession]) -> list[tuple[SpeculationController, list[VerifierSession]]]:
        """Return the sessions of a step by controller, and keep these controllers."""
        if self._shared is not None:
            return [(self._shared, list(sessions))]
        grouped: dict[ControllerGroup, list[VerifierSession]] = {}
        for session in sessions:
            grouped.setdefault(_group(session), []).append(session)
        found = []
        for group, members in grouped.items():
            if group not in self._known:
                self._known[group] = SpeculationController(self._tuning)
            self._known.move_to_end(group)
            found.append((self._known[group], members))
        while len(self._known) > max(MAX_GROUPS, len(found)):
            self._known.popitem(last=False)
        return found


def _group(session: VerifierSession) -> ControllerGroup:
    return ControllerGroup(session.request.tenant, session.policy.remote and session.draft_gain.helps)
