"""Engines for recordings: passes take a model's time on the virtual clock, and are counted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.engine.batch import PackedBatch, Packer
from specdec.engine.engine import Engine, cpu_threads
from specdec.engine.kv.slots import Slots
from specdec.engine.row_counts import InvariantRowCounts
from tests.replay.clock import Clock
from tests.verifier_service.fakes import LANGUAGE, VOCABULARY, ThreadedTextEngine

FEWER_THREADS = 1.3
"""Factor on a pass's duration with fewer than all threads."""

_HABIT = 3.0 * np.random.default_rng(7).normal(size=(VOCABULARY, VOCABULARY))
"""Bigram logits [previous, next]. They make texts repetitive, so that n-gram lookup finds candidates."""


class TimedEngine:
    """An engine whose passes take `base` + `row` n seconds of virtual time over n rows."""

    def __init__(self, engine: Engine, clock: Clock, base: float, row: float) -> None:
        threaded = cpu_threads(engine)
        assert threaded is not None, "recordings are of engines on the CPU"
        self.inner, self._threaded = engine, threaded
        self.capacity, self.vocabulary = engine.capacity, engine.vocabulary
        self.numerics, self.exact, self.threads = engine.numerics, engine.exact, threaded.threads
        self.passes = self.rows = 0
        self._clock, self._base, self._row = clock, base, row
        self._slowness = 1.0

    def packer(self) -> Packer:
        return self.inner.packer()

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        logits = self.inner.forward(batch)
        self.passes += 1
        self.rows += len(batch.tokens)
        self._clock.now += self._slowness * (self._base + self._row * len(batch.tokens))
        return logits

    def copy(self, source: Slots, target: Slots) -> None:
        self.inner.copy(source, target)

    def use_threads(self, count: int) -> None:
        self._threaded.use_threads(count)
        self._slowness = 1.0 if count == self.threads[0] else FEWER_THREADS


class HabitEngine(ThreadedTextEngine):
    """A target with bigram habits; with `noise`, an imperfect draft of it."""

    bad = -1

    def __init__(
        self, blocks: int, noise: float = 0.0, threads: Sequence[int] = (1,), row_counts: tuple[int, ...] = ()
    ) -> None:
        self.threads = tuple(threads)
        super().__init__(blocks, rows=InvariantRowCounts(row_counts) if row_counts else None)
        self._noise = noise
        self._spoken: dict[int, NDArray[np.float32]] = {}

    def speak(self, number: int) -> NDArray[np.float32]:
        if number not in self._spoken:
            logits = LANGUAGE.logits(number) + _HABIT[LANGUAGE.tokens[number]]
            if self._noise:
                seeds = [LANGUAGE.seeds[number], len(LANGUAGE.prefixes[number])]
                logits = logits + self._noise * np.random.default_rng(seeds).normal(size=VOCABULARY)
            self._spoken[number] = logits.astype(np.float32)
        return self._spoken[number]
