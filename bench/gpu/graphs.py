"""Compares steps with and without CUDA graphs, in results and speed: `python -m bench.gpu.graphs`.

Logits and hidden states are compared bit by bit. Steps of several sizes alternate, so that each graph runs again after
others. The time of a step is measured in both ways. Without a GPU neither way has graphs, and the kernels are
interpreted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from bench.arguments import whole_numbers
from bench.gpu.results import keep
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import hidden_states
from specdec.engine.gpu.engine import GpuEngine
from specdec.engine.model_directory import ModelDirectory
from specdec.local import DEMO

TURNS = 3
"""Steps of each size, with different tokens each time."""

TIMED = 30
"""Number of timed steps."""


def step(engine: GpuEngine, rows: int, seed: int) -> PackedBatch:
    """Return a step with the first tokens of `rows` texts."""
    tokens = np.random.default_rng(seed).integers(1, engine.vocabulary, rows)
    packer = engine.packer()
    for number, token in enumerate(tokens):
        slot = np.asarray([1 + number])
        added = packer.add_rows([int(token)], 0, slot)
        packer.add_path(slot, added)
        packer.want(added[0])
    return packer.pack()


def milliseconds(engine: GpuEngine, rows: int, times: int) -> float:
    """Return the median time of a step, packing and logits on the host included."""
    seconds = []
    for number in range(times):
        begin = time.perf_counter()
        engine.forward(step(engine, rows, number))
        seconds.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(seconds), 3)


def compared(graphed: GpuEngine, eager: GpuEngine, sizes: list[int], turns: int) -> list[str]:
    """Return the differences between the two engines, cycling through all sizes."""
    different = []
    for turn in range(turns):
        for rows in sizes:
            logits, hidden = hidden_states(graphed).forward_hidden(step(graphed, rows, turn))
            alone = graphed.forward(step(graphed, rows, turn))
            want, want_hidden = hidden_states(eager).forward_hidden(step(eager, rows, turn))
            pairs = {"logits": (logits, want), "hidden": (hidden, want_hidden), "logits alone": (alone, want)}
            different += [f"{name}, {rows} rows" for name, (a, b) in pairs.items() if not np.array_equal(a, b)]
    return sorted(set(different))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO / "target")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rows", type=whole_numbers, default=[1, 4, 16, 64, 128, 256, 512])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    on_gpu = args.device != "cpu"
    dtype = args.dtype if on_gpu else "float32"
    options: dict[str, Any] = {"capacity": 4096, "dtype": dtype, "device": args.device, "exact": on_gpu}
    graphed, eager = (GpuEngine(ModelDirectory(args.model), **options, cuda_graphs=each) for each in (True, False))
    found: dict[str, Any] = {"exact": graphed.exact, "turns": TURNS}
    found["different"] = compared(graphed, eager, args.rows, TURNS if on_gpu else 1)
    keep(args.out, found)
    times = TIMED if on_gpu else 1
    found["ms_with_graphs"] = {rows: milliseconds(graphed, rows, times) for rows in args.rows}
    found["ms_without"] = {rows: milliseconds(eager, rows, times) for rows in args.rows}
    keep(args.out, found)
    sys.exit(bool(found["different"]))


if __name__ == "__main__":
    main()
