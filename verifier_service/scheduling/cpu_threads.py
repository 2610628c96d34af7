"""Chooses how many CPU threads a step uses, and measures its latency with each number.

A draft on the verifier's own machine needs a CPU core while it works. While no draft works, the verifier uses that core
itself: speculation that does not pay must not leave the verifier slower than plain decoding.

All threads of a forward pass synchronise several times in every layer. If another process takes part of a core, each
synchronisation waits until the system gives the core back, and a step can take thirty times as long as with one thread
fewer. So the latencies with both numbers of threads are compared all the time.

An engine whose number of threads cannot be changed, such as one on a GPU, has a policy that only measures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from specdec.engine.engine import CpuThreads, Engine, cpu_threads
from verifier_service.costs.step_latency import StepLatency
from verifier_service.settings.tuning import DEFAULTS, ThreadTuning


class ThreadPolicy(Protocol):
    """The choice of the number of threads that a step is computed with, and the latency of steps with it."""

    @property
    def latency(self) -> StepLatency:
        """The latency of a step with its present number of threads."""

    @property
    def plain_latency(self) -> StepLatency:
        """The latency of a step with the number of threads that it has while no draft works."""

    @property
    def yields(self) -> bool:
        """True if steps use fewer threads while drafts work, on whatever machine these are."""

    @property
    def yielding(self) -> bool:
        """True if the engine has fewer threads now because of drafts, even if these bring nothing."""

    def choose(self, drafting: bool, now: float) -> None:
        """Set the number of threads for the next step; `drafting`: drafts work beside it."""

    def observe(self, rows: int, seconds: float) -> None:
        """Add a step over `rows` rows, made with the present number of threads."""


Measure = Callable[[], StepLatency]
"""A function that returns the latency of steps with the engine's present number of threads."""


def thread_policy(
    engine: Engine, measure: Measure, beside: Sequence[Engine] = (), tuning: ThreadTuning = DEFAULTS.threads
) -> ThreadPolicy:
    """Return the policy for an engine; engines `beside` it always get the same number of threads."""
    threaded = cpu_threads(engine)
    if threaded is None:
        return FixedThreads(measure())
    return AdaptiveThreads(threaded, measure, [each for each in map(cpu_threads, beside) if each is not None], tuning)


class FixedThreads:
    """The policy for an engine whose number of threads cannot be changed."""

    yields = yielding = False

    def __init__(self, latency: StepLatency) -> None:
        self.latency = self.plain_latency = latency

    def choose(self, drafting: bool, now: float) -> None:
        """Do nothing."""

    def observe(self, rows: int, seconds: float) -> None:
        self.latency.observe(rows, seconds)


class AdaptiveThreads:
    """The policy for an engine on CPU threads: all of them, or fewer while drafts or other processes work."""

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
        self._ratio = every.of(1) / fewest.of(1)  # with nothing else running
        self._plain = self._all  # number of threads of a step without drafts
        self._used = self._all
        self._drafted = -self._tuning.linger_seconds  # when drafts were last used
        self._clock = 0.0  # seconds of steps without drafts
        self._pause = self._tuning.first_probe_pause
        self._changed = 0.0  # when `_plain` last changed, by `_clock`
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
            self._drafted = now
        self._use(self._fewest if now - self._drafted < self._tuning.linger_seconds else self._plain)

    def observe(self, rows: int, seconds: float) -> None:
        self.latency.observe(rows, seconds)
        if self._all == self._fewest or self.yielding:
            return
        self._clock += seconds
        if self._plain == self._all:
            self._compare(rows, seconds)
        elif self._latencies[self._all].of(rows) < self._tuning.min_improvement * self.latency.of(rows):
            self._switch(self._all)
        elif self._clock - self._changed >= self._pause:
            self._pause = min(2 * self._pause, self._tuning.longest_probe_pause)
            self._latencies[self._all].become(rows, self._ratio * self.latency.of(rows))  # as if nothing else ran
            self._switch(self._all)

    def _compare(self, rows: int, seconds: float) -> None:
        """Add a step to the comparison of all threads' time with what fewer would have taken."""
        self._steps += 1
        self._taken += seconds
        self._with_fewest += self._latencies[self._fewest].of(rows)
        if self._taken < self._tuning.window_seconds or self._steps < self._tuning.min_steps:
            return
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
