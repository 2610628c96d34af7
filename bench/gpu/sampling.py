"""The time to choose tokens from logits on a GPU, by sampling parameters: `python -m bench.gpu.sampling`.

Logits fall with the logarithm of their rank, as a language model's do, so a nucleus of 0.9 holds some dozens of tokens.
Each time covers one `GpuLogits` over all rows: kernels, the copy of the shortlist, and the host's part of the choice.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import torch

from bench.arguments import whole_numbers
from bench.gpu.results import keep
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.gpu.sampler import GpuLogits

SAMPLINGS = {
    "greedy": Sampling(),
    "temperature": Sampling(temperature=0.8, seed=1),
    "top-p": Sampling(temperature=0.8, top_p=0.9, seed=1),
    "top-k": Sampling(temperature=0.8, top_k=40, seed=1),
    "min-p": Sampling(temperature=0.8, min_p=0.05, seed=1),
}

SLOPE, NOISE = 2.0, 0.3
"""Slope of logits over the logarithm of their rank, and the standard deviation of their noise."""


def logits(rows: int, vocabulary: int, device: str) -> torch.Tensor:
    """Return logits float32 [rows, vocabulary], with the ranks in a different order in each row."""
    of_rank = -SLOPE * torch.arange(1, vocabulary + 1, device=device, dtype=torch.float32).log()
    order = torch.argsort(torch.rand(rows, vocabulary, device=device), dim=1)
    return of_rank[order] + NOISE * torch.randn(rows, vocabulary, device=device)


def milliseconds(rows: torch.Tensor, sampling: Sampling, times: int) -> float:
    """Return the median time of choosing a token for each row."""
    sampler, seconds = RequestSampler(sampling), []
    for number in range(times + 1):  # the first compiles
        queries = {row: SamplingQuery(sampler, 100 * number + row) for row in range(len(rows))}
        if rows.is_cuda:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            GpuLogits(rows, queries)
        if rows.is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return round(1e3 * statistics.median(seconds[1:]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--vocabulary", type=int, default=128256)
    parser.add_argument("--rows", type=whole_numbers, default=[1, 64, 384])
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    found: dict[str, dict[int, float]] = {f"ms_{name}": {} for name in SAMPLINGS}
    for count in args.rows:
        rows = logits(count, args.vocabulary, args.device)
        for name, sampling in SAMPLINGS.items():
            found[f"ms_{name}"][count] = milliseconds(rows, sampling, args.times)
    keep(args.out, {"vocabulary": args.vocabulary, **found})


if __name__ == "__main__":
    main()
