"""Step times of target and draft alone, and the tokens a second of a system without overhead at these times.

T_v(n) is the time of the target's forward pass over n rows, each after a different text, in the services' exact
numerics, on all cores and on those left free by a draft, or on a GPU; t_d is the time of the draft's step over one row,
on one core. They are measured in the same rounds as the systems, since a machine's speed varies.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from specdec.engine.batch import PackedBatch
from specdec.engine.cpu_count import cores_given
from specdec.engine.engine import Engine, cpu_threads
from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Dtype, Placement, Weights

ROWS = (1, 2, 4, 8, 16, 32, 64, 128)

WARM_SECONDS = 0.1
"""Seconds of uncounted warm-up passes: kernels are compiled for each number of rows, and caches are cold."""

MIN_PASSES, MAX_PASSES, ENOUGH_SECONDS = 5, 15, 0.5
"""Limits on the counted passes: minimum, maximum, and seconds after which the minimum suffices."""

Times = dict[str, float]
"""Seconds of a step: the target's by "threads/rows", the draft's by "draft"."""


class StepTimes:
    """Step times of two engines in this process. Between measurements the engines are idle."""

    def __init__(
        self,
        target: Path,
        draft: Path | None,
        dtype: Dtype,
        text: int,
        device: str = "cpu",
        threads: int | None = None,
        weights: Weights = "stored",
    ) -> None:
        """Each row comes after a text of `text` tokens. The target is on `device`; on the CPU it has `threads`, if
        given. `weights` are the target's."""
        cores = cores_given()
        self._threads = [threads] if threads else sorted({cores, max(1, cores - 1)}, reverse=True)
        if device != "cpu":  # a draft takes no cores from a GPU
            self._threads = self._threads[:1]
        self._text = text
        placement = Placement("torch", dtype, device, 1 + (text + 1) * ROWS[-1], weights=weights)
        self._target = load_engine(ModelDirectory(target), placement, threads=self._threads)
        self._batches = {rows: _rows(self._target, rows, text) for rows in ROWS}
        self._draft = None
        if draft is not None:
            self._draft = load_engine(
                ModelDirectory(draft), Placement("onnx", kv_tokens=text + 2, is_draft=True), threads=(1,)
            )
            self._node = _rows(self._draft, 1, text)

    def measure(self) -> Times:
        """Return median seconds."""
        found: Times = {}
        threaded = cpu_threads(self._target)
        for threads in self._threads:
            if threaded is not None:  # the target is on the CPU
                threaded.use_threads(threads)
            for rows, packed in self._batches.items():
                found[f"{threads}/{rows}"] = _median(self._target, packed)
        if self._draft is not None:
            found["draft"] = _median(self._draft, self._node)
        return found

    def ideal(
        self, times: Times, streams: int, prompt: int, total: int, *, tokens: float, candidates: float, drafted: float
    ) -> float:
        """Return tokens a second of an ideal system: `streams` streams, with prompts of `prompt` tokens each, generate
        `total` tokens together.

        Per stream, a step has `candidates` candidates and yields `tokens` tokens, `drafted` of them from a draft. The
        first step computes all prompts. Each further step begins when the last one ends, and takes the time of its
        rows, but at least the draft's time for `drafted` sequential nodes. There is no network and no overhead.
        """
        alone, shared = self._threads[0], self._threads[-1 if drafted else 0]
        step = max(_seconds(times, shared, streams * (1.0 + candidates)), drafted * times.get("draft", 0.0))
        return total / (_seconds(times, alone, streams * prompt) + total / (streams * tokens) * step)


def _seconds(times: Times, threads: int, rows: float) -> float:
    """Return T_v(rows), interpolated; beyond the largest measured row count, extrapolated linearly."""
    known = [times[f"{threads}/{each}"] for each in ROWS]
    slope = (known[-1] - known[-2]) / (ROWS[-1] - ROWS[-2])
    return float(np.interp(rows, ROWS, known)) + slope * max(0.0, rows - ROWS[-1])


def of_answer(tokens: int, steps: int, candidates: int, sources: Mapping[str, int]) -> dict[str, float]:
    """Return the figures per step needed by `ideal`."""
    return {
        "tokens": tokens / steps,
        "candidates": candidates / steps,
        "drafted": sources.get("remote_draft", 0) / steps,
    }


def _rows(engine: Engine, rows: int, text: int) -> PackedBatch:
    packer = engine.packer()
    for row in range(rows):
        slots = np.arange(1 + row * (text + 1), 1 + (row + 1) * (text + 1))
        added = packer.add_rows([0], text, slots[-1:])
        packer.add_path(slots, added)
        packer.want(added[0])
    return packer.pack()


def _median(engine: Engine, packed: PackedBatch) -> float:
    begin = time.perf_counter()
    while time.perf_counter() - begin < WARM_SECONDS:
        engine.forward(packed)
    seconds: list[float] = []
    while len(seconds) < MIN_PASSES or (len(seconds) < MAX_PASSES and sum(seconds) < ENOUGH_SECONDS):
        begin = time.perf_counter()
        engine.forward(packed)
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)
