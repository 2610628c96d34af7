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
from verifier_service.scheduling.step_latency import StepLatency

MIN_IMPROVEMENT = 0.9
"""Fraction of the present step latency that another number of threads must stay below to be taken."""

WINDOW_SECONDS, MIN_STEPS = 0.5, 5
"""Seconds of steps, and number of steps, that one comparison sums up at least. A draft that only reads committed tokens
now and then makes a single step long, but not the sum."""

FIRST_PROBE_PAUSE, LONGEST_PROBE_PAUSE = 1.0, 60.0
"""Seconds of steps until all threads are tried again, at first and at most; doubled with each attempt."""

LINGER_SECONDS = 0.05
"""Seconds for which drafts keep their core when their candidates are no longer used: the message has to reach them, and
they may be in the middle of a step over all that they had not read. Taking the core at once cost a step of thirty times
the usual length."""

SETTLED_SECONDS = 1.0
"""Seconds of steps with all threads, without a loss, after which the pause is FIRST_PROBE_PAUSE again."""


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


def thread_policy(engine: Engine, measure: Measure, beside: Sequence[Engine] = ()) -> ThreadPolicy:
    """Return the policy for an engine; engines `beside` it always get the same number of threads."""
    threaded = cpu_threads(engine)
    if threaded is None:
        return FixedThreads(measure())
    return AdaptiveThreads(threaded, measure, [each for each in map(cpu_threads, beside) if each is not None])


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

    def __init__(self, engine: CpuThreads, measure: Measure, beside: Sequence[CpuThreads] = ()) -> None:
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
        self._drafted = -LINGER_SECONDS  # when drafts were last used
        self._clock = 0.0  # seconds of steps without drafts
        self._pause = FIRST_PROBE_PAUSE
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
        self._use(self._fewest if now - self._drafted < LINGER_SECONDS else self._plain)

    def observe(self, rows: int, seconds: float) -> None:
        self.latency.observe(rows, seconds)
        if self._all == self._fewest or self.yielding:
            return
        self._clock += seconds
        if self._plain == self._all:
            self._compare(rows, seconds)
        elif self._latencies[self._all].of(rows) < MIN_IMPROVEMENT * self.latency.of(rows):
            self._switch(self._all)
        elif self._clock - self._changed >= self._pause:
            self._pause = min(2 * self._pause, LONGEST_PROBE_PAUSE)
            self._latencies[self._all].become(rows, self._ratio * self.latency.of(rows))  # as if nothing else ran
            self._switch(self._all)

    def _compare(self, rows: int, seconds: float) -> None:
        """Add a step to the comparison of all threads' time with what fewer would have taken."""
        self._steps += 1
        self._taken += seconds
        self._with_fewest += self._latencies[self._fewest].of(rows)
        if self._taken < WINDOW_SECONDS or self._steps < MIN_STEPS:
            return
        if self._with_fewest < MIN_IMPROVEMENT * self._taken:
            self._switch(self._fewest)
        elif self._clock - self._changed >= SETTLED_SECONDS:
            self._pause = FIRST_PROBE_PAUSE
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
