"""Compares cuBLAS with our products on a GPU: `python -m bench.gpu.products --shapes 4096x4096,14336x4096`.

A shape is written as columns of the input x columns of the result, in bfloat16. Reported for each way: how many row
counts in `CANDIDATES` give a row the same bits, and the microseconds at some row counts. Products run as one CUDA
graph over several copies of the weights, more than caches hold. "whole" is cuBLASLt without split-K.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.functional import linear

from bench.arguments import whole_numbers
from bench.gpu.results import keep
from specdec.engine.gpu.linear import product, split_k
from specdec.engine.hf.batch_invariance import find
from specdec.engine.row_counts import CANDIDATES

COPIED_BYTES = 300_000_000
"""Bytes of all copies of the weights together."""

Product = Callable[[Tensor, Tensor], Tensor]


@contextmanager
def whole_sums() -> Iterator[None]:
    """Make cuBLASLt compute products, without split-K."""
    matmul, library = torch.backends.cuda.matmul, torch.backends.cuda.preferred_blas_library()
    before = matmul.allow_bf16_reduced_precision_reduction
    torch.backends.cuda.preferred_blas_library("cublaslt")
    matmul.allow_bf16_reduced_precision_reduction = (False, False)
    try:
        yield
    finally:
        matmul.allow_bf16_reduced_precision_reduction = (before, True)
        torch.backends.cuda.preferred_blas_library(library)


def microseconds(multiply: Product, rows: int, weights: Sequence[Tensor]) -> float:
    x = torch.randn(rows, weights[0].shape[1], device=weights[0].device, dtype=weights[0].dtype)

    def run() -> None:
        for weight in weights:
            multiply(x, weight)

    milliseconds: float = triton.testing.do_bench_cudagraph(run, rep=12, return_mode="median")
    return round(1e3 * milliseconds / len(weights), 1)


def of_way(multiply: Product, layer: torch.nn.Linear, rows: Sequence[int]) -> dict[str, Any]:
    inputs, outputs = layer.in_features, layer.out_features
    alike = find([layer], "cuda")[inputs, outputs].counts
    weights = [torch.randn_like(layer.weight) for _ in range(max(2, COPIED_BYTES // (2 * inputs * outputs)))]
    return {
        "alike": f"{len(alike)} of {len(CANDIDATES)}",
        "us": {count: microseconds(multiply, count, weights) for count in rows},
    }


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="2048x2048,8192x2048,4096x4096,14336x4096")
    parser.add_argument("--rows", type=whole_numbers, default=[1, 8, 32, 128, 512])
    parser.add_argument("--out", type=Path, required=True, help="folder for the figures")
    args = parser.parse_args()
    found: dict[str, Any] = {}
    for shape in args.shapes.split(","):
        inputs, outputs = (int(number) for number in shape.split("x"))
        layer = torch.nn.Linear(inputs, outputs, bias=False, device="cuda", dtype=torch.bfloat16)
        ours = split_k(layer)
        assert ours is not None
        found[shape] = {"cublas": of_way(linear, layer, args.rows)}
        with whole_sums():
            found[shape]["whole"] = of_way(linear, layer, args.rows)
        found[shape]["ours"] = of_way(lambda x, weight: product(x, weight, None), ours, args.rows)
        keep(args.out, found)
    alike = f"{len(CANDIDATES)} of {len(CANDIDATES)}"
    sys.exit(any(of["ours"]["alike"] != alike for of in found.values()))


if __name__ == "__main__":
    main()
