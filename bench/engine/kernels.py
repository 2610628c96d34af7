"""Measures the breakdown of a step's time on a GPU: `python -m bench.engine.kernels --steps 32x8x1024`.

A step is written as sessions x new tokens x context. For each: the time of the first step, which records its CUDA graph
and may compile kernels; the host's packing time; the time until the GPU has finished; and the slowest kernels, by
torch's profiler. Weights are random.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from bench.engine.shapes import SHAPES, Combination, write
from bench.engine.systems import packed
from bench.report import folder
from specdec.engine.engine import launch_of
from specdec.engine.gpu.engine import GpuEngine
from specdec.engine.hf.random_weights import RandomWeights
from verifier_service.costs.step_latency import GREEDY

TIMED, PROFILED = 15, 3
"""Steps in the median, and steps under the profiler."""

KERNELS = 12
"""Number of slowest kernels to report."""


def step_size(text: str) -> Combination:
    sessions, tokens, context = (int(number) for number in text.split("x"))
    return Combination(tokens=tokens, context=context, sessions=sessions)


def measured(engine: GpuEngine, what: Combination, times: int) -> dict[str, Any]:
    """Return milliseconds of the first step; of later steps the median packing, the median of the rest, and the mean
    times of all GPU kernels together and of the slowest ones."""
    launch = launch_of(engine)
    queries = dict.fromkeys(range(what.rows), GREEDY)

    def run() -> tuple[float, float]:
        begin = time.perf_counter()
        batch = packed(engine, what)
        between = time.perf_counter()
        launch(batch).logits(lambda: queries)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return 1e3 * (between - begin), 1e3 * (time.perf_counter() - between)

    _, first = run()
    run()
    packing, rest = zip(*(run() for _ in range(times)), strict=True)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities) as seen:
        for _ in range(min(times, PROFILED)):
            run()
    kernels = {
        each.key: each.self_device_time_total / 1e3 / min(times, PROFILED)
        for each in seen.key_averages()
        if each.device_type.name == "CUDA"
    }
    longest = sorted(kernels, key=lambda name: -kernels[name])[:KERNELS]
    return {
        "first_ms": round(first, 1),
        "pack_ms": round(statistics.median(packing), 3),
        "step_ms": round(statistics.median(rest), 3),
        "kernels_ms": round(sum(kernels.values()), 3),
        "longest_ms": {name[:60]: round(kernels[name], 3) for name in longest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="llama-3.2-1b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", default="1x1x1024,1x16x8192,32x1x1024,32x8x1024,32x64x1024")
    parser.add_argument("--out", type=folder, required=True, help="folder for the figures")
    args = parser.parse_args()
    names = args.steps.split(",")
    steps = [step_size(name) for name in names]
    on_gpu = args.device != "cpu"
    slots = 1 + max(what.slots for what in steps)  # slot 0 is padding
    with tempfile.TemporaryDirectory() as scratch:
        engine = GpuEngine(
            RandomWeights(write(SHAPES[args.shape], Path(scratch) / args.shape)),
            capacity=max(4096, slots) if on_gpu else 1024,
            dtype="bfloat16" if on_gpu else "float32",
            device=args.device,
            exact=on_gpu,
        )
    found: dict[str, Any] = {"shape": args.shape, "numerics": engine.numerics}
    for name, what in zip(names, steps, strict=True):
        found[name] = measured(engine, what, TIMED if on_gpu else 1)
        print(f"{name}: {found[name]}", flush=True)
        (args.out / "figures.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
