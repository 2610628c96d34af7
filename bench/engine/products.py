"""Measures products with quantised weights on one core: `python -m bench products --shape 1536x8960`.

Each kind multiplies by LAYERS different weights in turn, so that none stays in the processor's cache. Printed for each
kind: milliseconds a product by row count, and whether a row has the same bits in every batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from bench.arguments import parser_of
from specdec.engine.hf.block_linear import BlockLinear
from specdec.engine.hf.linear import PackedLinear

ROWS = (1, 2, 4, 8, 16, 64)
LAYERS = 24
RUNS = 5


def torchs_int8(linear: torch.nn.Linear) -> Callable[[Tensor], Tensor]:
    """Return torch's product with 8-bit weights and one scale per row."""
    weight = linear.weight.detach().float()
    scales = weight.abs().amax(1) / 127
    numbers, narrow = (weight / scales[:, None]).round().to(torch.int8), scales.bfloat16()
    return lambda x: torch.ops.aten._weight_int8pack_mm(x, numbers, narrow)


KINDS: dict[str, Callable[[torch.nn.Linear], Callable[[Tensor], Tensor]]] = {
    "bfloat16": PackedLinear,
    "torch, 8 bits": torchs_int8,
    "blocks, 8 bits": lambda linear: BlockLinear(linear, 8, 1),
    "blocks, 4 bits": lambda linear: BlockLinear(linear, 4, 1),
}


def main(given: Sequence[str]) -> None:
    parser = parser_of("products", __doc__)
    parser.add_argument("--shape", default="1536x8960", help="inputs x outputs of a layer")
    inputs, outputs = (int(number) for number in parser.parse_args(given).shape.split("x"))
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'':16}" + "".join(f"{rows:8}" for rows in ROWS) + "  rows")
    with torch.inference_mode():
        for name, kind in KINDS.items():
            layers = [kind(torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.bfloat16)) for _ in range(LAYERS)]
            x = torch.randn(max(ROWS), inputs, dtype=torch.bfloat16)
            times = "".join(f"{milliseconds(layers, x[:rows]):8.3f}" for rows in ROWS)
            print(f"{name:16}{times}  {'alike' if is_row_exact(layers[0], x) else 'different'}", flush=True)


def milliseconds(layers: Sequence[Callable[[Tensor], Tensor]], x: Tensor) -> float:
    def once() -> float:
        begin = time.perf_counter()
        for layer in layers:
            layer(x)
        return 1e3 * (time.perf_counter() - begin) / len(layers)

    return min(once() for _ in range(RUNS))


def is_row_exact(layer: Callable[[Tensor], Tensor], x: Tensor) -> bool:
    whole = layer(x)
    return all(
        torch.equal(torch.cat([layer(part) for part in torch.split(x, rows)]), whole) for rows in ROWS if rows < len(x)
    )
