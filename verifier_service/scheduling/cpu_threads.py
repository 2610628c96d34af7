"""How many cores a step has, and what it costs with them.

A draft on the verifier's own machine wants a core while it is at work. While none is, that core is the verifier's:
speculation that does not pay must not leave it slower than if nobody had speculated.

All threads of a forward pass meet several times in every layer. Where another process takes a part of a core, each
meeting waits until the system gives it back, and a step can take thirty times as long as with a thread fewer. So what
steps cost with either number is compared as they come.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from specdec.engine.engine import Engine
from verifier_service.scheduling.step_latency import StepLatency

MIN_IMPROVEMENT = 0.9
"""Part of the present cost that another number of threads must come down to, to be taken."""

WINDOW_SECONDS, MIN_STEPS = 0.5, 5
"""Seconds of steps, and steps, over which what all threads take is summed up: a draft that reads now and then what was
committed makes a single step long, and all of them together not."""

FIRST_PROBE_PAUSE, LONGEST_PROBE_PAUSE = 1.0, 60.0
"""Seconds of steps until all threads are tried again; each time that they lose twice as long."""

LINGER_SECONDS = 0.05
"""Seconds for which drafts keep their core when they are no longer wanted: they have to hear of it, in the midst of a
step over all that they had not read. To take it from them at once cost a step of thirty times the usual length."""

SETTLED_SECONDS = 1.0
"""Seconds of steps with all threads after which it counts as over that they had to wait."""


class ThreadPolicy:
    """Of an engine that can compute with all of its threads, or with fewer beside drafts or strangers at work."""

    def __init__(self, engine: Engine, measure: Callable[[], StepLatency], beside: Sequence[Engine] = ()) -> None:
        """`measure` says what steps cost with the threads that the engine has just then. Engines `beside` it have the
        same."""
        self._engines = [engine, *beside]
        self._latencies: dict[int, StepLatency] = {}
        for threads in reversed(engine.threads):
            engine.use_threads(threads)
            self._latencies[threads] = measure()
        self._all, self._fewest = engine.threads[0], engine.threads[-1]
        self._ratio = self._latencies[self._all].of(1) / self._latencies[self._fewest].of(
            1
        )  # where nobody is in the way
        self._plain = self._all  # threads of a step without drafts
        self._used = self._all
        self._drafted = -LINGER_SECONDS  # when drafts were last at work
        self._clock = 0.0  # seconds of undrafted steps
        self._pause = FIRST_PROBE_PAUSE
        self._changed = 0.0  # when another number was last taken
        self._reset()

    @property
    def latency(self) -> StepLatency:
        """Of a step with the threads that it has now."""
        return self._latencies[self._used]

    @property
    def plain_latency(self) -> StepLatency:
        """Of a step with as many as it has where no draft is at work."""
        return self._latencies[self._plain]

    @property
    def yields(self) -> bool:
        """Whether drafts at work take some of them, wherever they are at work."""
        return self._fewest < self._all

    @property
    def yielding(self) -> bool:
        """Whether drafts have taken some of them, even if they bring nothing."""
        return self._used != self._plain

    def choose(self, drafting: bool, now: float) -> None:
        """Have the next step leave room for drafts at work, or not."""
        if drafting:
            self._drafted = now
        self._use(self._fewest if now - self._drafted < LINGER_SECONDS else self._plain)

    def observe(self, rows: int, seconds: float) -> None:
        """A step over `rows` rows was made, with the threads that it has now."""
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
            self._latencies[self._all].become(rows, self._ratio * self.latency.of(rows))  # as if nobody were in the way
            self._switch(self._all)

    def _compare(self, rows: int, seconds: float) -> None:
        """What all threads have taken with what fewer would have."""
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
