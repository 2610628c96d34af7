"""Compiles the GPU kernels to machine code, without needing a GPU: `python -m tests.engine.gpu.compile_kernels
CAPABILITY DTYPE`, like 90 and bf16, without TRITON_INTERPRET.

The interpreter runs kernels as Python, so it accepts code that the compiler rejects.
"""

from __future__ import annotations

import sys
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from specdec.engine.gpu import attention, kernels, linear
from specdec.engine.gpu.attention import Tiling
from specdec.engine.gpu.layout import TILE_ROWS
from specdec.engine.partials import SPLIT

WIDTH = 40
"""Width of a head: not a power of two."""

SHARED_BYTES = 99 << 10
"""Shared memory available to a block on the smallest GPUs with bfloat16 tensor cores (capability 8.6, 8.9)."""


def compile_for(capability: int, kernel: Any, types: dict[str, str], constants: dict[str, Any], **options: int) -> None:
    """Compile a kernel with these types of its non-constant arguments. Raises the compiler's exceptions."""
    names = kernel.arg_names
    assert sorted([*types, *constants]) == sorted(names), kernel
    source = ASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name, kind in types.items() if kind.startswith("*")},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"]
    assert compiled.metadata.shared <= SHARED_BYTES, f"{kernel} wants {compiled.metadata.shared} bytes"


def main(capability: int, dtype: str) -> None:
    stored = f"*{dtype}"
    heads = {"HEADS": 8, "VALUE_WIDTH": WIDTH, "VALUE_BLOCK": 64, "SPLIT": SPLIT}
    found = {"largest": "*fp32", "totals": "*fp32", "sums": "*fp32", "positions": "*i32", "first_partials": "*i32"}
    for width, window, capped in ((WIDTH, 100, True), (128, 0, False)):
        tiling = Tiling.of(width, width, 4 if dtype == "fp32" else 2)
        compile_for(
            capability,
            attention._read,
            {"query": stored, "keys": stored, "values": stored, "tile_counts": "*i32", "tile_splits": "*i32"}
            | {"tile_row_indices": "*i32", "tile_keys": "*i32", "query_row": "i32", "query_head": "i32"}
            | {"scale": "fp32", "softcap": "fp32"}
            | found,
            {"KV_HEADS": 2, "SHARED": 4, "TILE_CAPACITY": 16, "WIDTH": width, "VALUE_WIDTH": width, "ROWS": TILE_ROWS}
            | {"BLOCK": tiling.block, "VALUE_BLOCK": tiling.value_block, "SPLIT": SPLIT, "TILE": tiling.tile}
            | {"CAPPED": capped, "WINDOW": window, "WIDENED": False},
            num_warps=tiling.warps,
            num_stages=tiling.stages,
        )
        constants = heads | {"AT_ONCE": attention.SPLITS_AT_ONCE, "WINDOW": window}
        compile_for(capability, attention._add_up, found | {"out": stored}, constants)
    rows = {"positions": "*i32", "slots": "*i32"}
    for normalised in (False, True):
        compile_for(
            capability,
            kernels._rotate,
            {"projected": stored, "norms": stored, "cos": "*fp32", "sin": "*fp32", "query": stored}
            | {"keys": stored, "values": stored, "epsilon": "fp32"}
            | rows,
            {"HEADS": 8, "KV_HEADS": 2, "WIDTH": WIDTH, "BLOCK": 32, "NORMALISED": normalised},
            num_warps=1,
        )
    compile_for(
        capability,
        kernels._add_and_normalise,
        {"residual": stored, "update": stored, "weight": stored, "out": stored, "epsilon": "fp32"},
        {"HIDDEN": 320, "BLOCK": 512},
    )
    compile_for(capability, kernels._gate, {"projected": stored, "out": stored}, {"INNER": 900, "BLOCK": 1024})
    compile_for(
        capability,
        kernels._store,
        {"key": stored, "value": stored, "slots": "*i32", "keys": stored, "values": stored}
        | {"key_row": "i32", "key_head": "i32", "value_row": "i32", "value_head": "i32"},
        {"KV_HEADS": 2, "WIDTH": WIDTH, "VALUE_WIDTH": WIDTH, "BLOCK": 64},
        num_warps=1,
    )
    if dtype == "fp32":
        return  # layers of this dtype are left to cuBLAS
    products = {"x": stored, "weight": stored, "bias": stored, "rows": "i32", "x_row": "i32"}
    for whole, block in (
        (False, linear.MIN_ROWS),
        (False, 32),
        (False, 64),
        (False, linear.MAX_ROWS),
        (True, linear.MAX_ROWS),
    ):
        many = block == linear.MAX_ROWS
        compile_for(
            capability,
            linear._sums,
            products | {"sums": stored if whole else "*fp32"},
            {"INPUTS": 4096, "OUTPUTS": 4096, "PARTS": 4, "LENGTH": 1024, "ROW_BLOCK": block}
            | {"COLUMN_BLOCK": linear.COLUMNS * (1 + many), "TERMS": linear.TERMS // (1 + many)}
            | {"WHOLE": whole, "BIASED": whole, "WIDENED": False},
            num_warps=8 if many else 4,
            num_stages=4 if block <= 2 * linear.MIN_ROWS else 3,
        )
    compile_for(
        capability,
        linear._add_up,
        {"sums": "*fp32", "bias": stored, "out": stored, "rows": "i32"},
        {"OUTPUTS": 4096, "PARTS": 4, "BLOCK": linear.ADDED, "BIASED": True},
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
