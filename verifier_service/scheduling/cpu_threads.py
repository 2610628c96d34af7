"""Chooses the number of CPU threads for a step, and measures the step latency with each number.

A draft on the verifier's own machine needs a CPU core while it works. While no draft works, the verifier uses that core
itself: speculation that does not pay must not make the verifier slower than plain decoding.

The threads of a forward pass synchronise several times in every layer. If another process uses one of their cores, each
synchronisation waits until the operating system gives the core back, and a step can take thirty times as long as with
one thread fewer. So the latencies of both thread counts are compared continuously.

For an engine with a fixed number of threads, such as one on a GPU, the policy only measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specdec.engine.engine import CpuThreads, Engine, cpu_threads
from verifier_service.costs.step_latency import StepLatency
from verifier_service.settings.tuning import DEFAULTS, ThreadTuning


class ThreadPolicy(Protocol):
    """The number of threads of a step, and the step latency with that number."""

    @property
    def latency(self) -> StepLatency:
        """The step latency with the current number of threads."""

    @property
    def plain_latency(self) -> StepLatency:
        """The step latency with the number of threads used while no draft works."""

    @property
    def yields(self) -> bool:
        """True if steps use fewer threads while drafts work, wherever the drafts run."""

    @property
    def yielding(self) -> bool:
        """True if the engine has fewer threads now because of drafts, whether or not these pay."""

    def choose(self, drafting: bool, now: float) -> None:
        """Set the number of threads for the next step; `drafting`: drafts work during it."""

    def observe(self, rows: int, seconds: float) -> None:
        """Add the duration of a step over `rows` rows with the current number of threads."""


Measure = Callable[[], StepLatency]
"""Measures the step latency with the engine's current number of threads."""


def thread_policy(
    engine: Engine, measure: Measure, beside: Sequence[Engine] = (), tuning: ThreadTuning = DEFAULTS.threads
) -> ThreadPolicy:
    """Return the policy for an engine; engines `beside` it always get the same number of threads."""
    threaded = cpu_threads(engine)
    if threaded is None:
        return FixedThreads(measure())
    return AdaptiveThreads(
        threaded, measure, [threads for threads in map(cpu_threads, beside) if threads is not None], tuning
    )


class FixedThreads:
    """The policy for an engine with a fixed number of threads."""

    yields = yielding = False

    def __init__(self, latency: StepLatency) -> None:
        self.latency = self.plain_latency = latency

    def choose(self, drafting: bool, now: float) -> None:
        """Do nothing."""

    def observe(self, rows: int, seconds: float) -> None:
        self.latency.observe(rows, seconds)


class AdaptiveThreads:
    """The policy for an engine on CPU threads: it uses all of them, or fewer while drafts or other processes work."""

    def __init__(
        self,
        engine: CpuThreads,
        measure: Measure,
        beside: Sequence[CpuThreads] = (),
        tuning: ThreadTuning = DEFAULTS.threads,
    ) -> None:
        self._tuning = tuning
        self._engines = [engine, *beside]
        self._latencies: dict[int, StepLatency] = {}
        for threads in reversed(engine.threads):
            engine.use_threads(threads)
            self._latencies[threads] = measure()
        self._all, self._fewest = engine.threads[0], engine.threads[-1]
        every, fewest = self._latencies[self._all], self._latencies[self._fewest]
        self._ratio = every.of(1) / fewest.of(1)  # on an idle machine
        self._plain = self._all  # threads of a step without drafts
        self._used = self._all
        self._last_drafting = -self._tuning.linger_seconds  # time of the last use of drafts
        self._clock = 0.0  # seconds of steps without drafts
        self._pause = self._tuning.first_probe_pause
        self._changed = 0.0  # last change of `_plain`, by `_clock`
        self._reset()

    @property
    def latency(self) -> StepLatency:
        return self._latencies[self._used]

    @property
    def plain_latency(self) -> StepLatency:
        return self._latencies[self._plain]

    @property
    def yields(self) -> bool:
        return self._fewest < self._all

    @property
    def yielding(self) -> bool:
        return self._used != self._plain

    def choose(self, drafting: bool, now: float) -> None:
        if drafting:
            self._last_drafting = now
        self._use(self._fewest if now - self._last_drafting < self._tuning.linger_seconds else self._plain)

    def observe(self, rows: int, seconds: float) -> None:
        self.latency.observe(rows, seconds)
        if self._all == self._fewest or self.yielding:
            return
        self._clock += seconds
        if self._plain == self._all:
            self._compare(rows, seconds)
        # Return to all threads only for a clear improvement, so that noise does not flip the choice.
        elif self._latencies[self._all].of(rows) < self._tuning.min_improvement * self.latency.of(rows):
            self._switch(self._all)
        # Probe all threads with exponential back-off: a failed probe can cost slow steps.
        elif self._clock - self._changed >= self._pause:
            self._pause = min(2 * self._pause, self._tuning.longest_probe_pause)
            self._latencies[self._all].become(rows, self._ratio * self.latency.of(rows))  # as on an idle machine
            self._switch(self._all)

    def _compare(self, rows: int, seconds: float) -> None:
        """Add a step to the comparison: its time with all threads, and the expected time with the fewest."""
        self._steps += 1
        self._taken += seconds
        self._with_fewest += self._latencies[self._fewest].of(rows)
        if self._taken < self._tuning.window_seconds or self._steps < self._tuning.min_steps:
            return
        # Another process is using a core: all threads are clearly slower than fewer would be.
        if self._with_fewest < self._tuning.min_improvement * self._taken:
            self._switch(self._fewest)
        elif self._clock - self._changed >= self._tuning.settled_seconds:
            self._pause = self._tuning.first_probe_pause
        self._reset()

    def _reset(self) -> None:
        self._steps, self._taken, self._with_fewest = 0, 0.0, 0.0

    def _switch(self, threads: int) -> None:
        self._plain, self._changed = threads, self._clock
        self._reset()
        self._use(threads)

    def _use(self, threads: int) -> None:
        if threads != self._used:
            self._used = threads
            for engine in self._engines:
                engine.use_threads(threads)
