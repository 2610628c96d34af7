"""Batch-invariant linear layers as Triton kernels: a row has the same bits in every batch.

A product of few columns has too few tiles to occupy a GPU, so its sums are cut into parts, which are computed
concurrently and then added up ("split-K"). cuBLAS chooses the cut by the number of rows, which changes a row's bits.
Here the cut depends on the layer's shape alone. A tensor core accumulates a part in the same order for any number of
rows: the weights are the left factor, whose tiles are always full, and the rows are the right one.
"""

from __future__ import annotations

import zlib

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.engine.gpu.kernels import INTERPRETED
from specdec.engine.hf.linear import is_plain

MIN_PART = 512
"""Approximate minimum of terms in a part: shorter reads do not amortise memory latency."""

PROGRAMS = 256
"""Approximate number of programs for the product of a few rows: two per multiprocessor of a large GPU."""

COLUMNS = 64
"""Columns of the result per program for few rows: the height of a tensor core's instruction."""

MIN_ROWS, MAX_ROWS = 16, 128
"""Bounds on the rows per program."""

TERMS = 128
"""Terms per read for few rows; a part is a multiple of it."""

WHOLE = 96
"""With at least this many programs, each adds up all parts of its columns itself, without partial sums in memory.
Chosen by hand: fewer would leave much of a large GPU idle."""

ADDED = 1024
"""Elements of the result per program of the second kernel."""


class SplitKLinear(torch.nn.Linear):
    """A linear layer that shares another's weights, in float16 or bfloat16, and accumulates in float32."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias

    def forward(self, input: Tensor) -> Tensor:
        flat = input.reshape(-1, self.in_features)
        return product(flat, self.weight, self.bias).view(*input.shape[:-1], self.out_features)


def split_k(layer: torch.nn.Module) -> SplitKLinear | None:
    """Return a layer's split-K counterpart; None if it has none."""
    if is_plain(layer) and layer.weight.dtype in (torch.float16, torch.bfloat16) and layer.weight.is_contiguous():
        return SplitKLinear(layer)
    return None


def parts_of(inputs: int, outputs: int) -> int:
    """Return the number of parts for a layer of this shape."""
    blocks = -(-outputs // COLUMNS)
    parts = max(1, min(PROGRAMS // blocks, inputs // MIN_PART))
    return -(-inputs // length_of(inputs, parts))


def length_of(inputs: int, parts: int) -> int:
    """Return the number of terms per part; the last part may have fewer."""
    return TERMS * -(-inputs // (TERMS * parts))


def cuts(model: torch.nn.Module) -> str:
    """Return a name that identifies the cuts of a model's layers, since other cuts give other bits."""
    split = {
        (module.in_features, module.out_features) for module in model.modules() if isinstance(module, SplitKLinear)
    }
    cut = sorted((*shape, length_of(shape[0], parts_of(*shape))) for shape in split)
    return f"{len(cut)}-{zlib.crc32(repr(cut).encode()):08x}"


def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x [t, inputs] times the transposed weight [outputs, inputs], plus bias [outputs], rounded once to the
    dtype of x and weight."""
    x = x if x.stride(1) == 1 else x.contiguous()
    rows, inputs = x.shape
    outputs = len(weight)
    parts = parts_of(inputs, outputs)
    row_block = min(MAX_ROWS, max(MIN_ROWS, triton.next_power_of_2(rows)))
    many = row_block == MAX_ROWS
    column_block = 2 * COLUMNS if many else COLUMNS
    columns, blocks = triton.cdiv(outputs, column_block), triton.cdiv(rows, row_block)
    out = torch.empty(rows, outputs, dtype=x.dtype, device=x.device)
    whole = parts == 1 or columns * blocks >= WHOLE
    sums = out if whole else torch.empty(parts, rows, outputs, dtype=torch.float32, device=x.device)
    _sums[(columns, blocks, 1 if whole else parts)](
        x,
        weight,
        out if bias is None else bias,
        sums,
        rows,
        x.stride(0),
        INPUTS=inputs,
        OUTPUTS=outputs,
        PARTS=parts,
        LENGTH=length_of(inputs, parts),
        ROW_BLOCK=row_block,
        COLUMN_BLOCK=column_block,
        TERMS=TERMS // 2 if many else TERMS,
        WHOLE=whole,
        BIASED=bias is not None,
        WIDENED=INTERPRETED and x.dtype == torch.bfloat16,
        num_warps=8 if many else 4,
        num_stages=4 if row_block <= 2 * MIN_ROWS else 3,
    )
    if not whole:
        _add_up[(rows, triton.cdiv(outputs, ADDED))](
            sums,
            out if bias is None else bias,
            out,
            rows,
            OUTPUTS=outputs,
            PARTS=parts,
            BLOCK=ADDED,
            BIASED=bias is not None,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _sums(
    x: tl.tensor,  # [rows, INPUTS]
    weight: tl.tensor,  # [OUTPUTS, INPUTS]
    bias: tl.tensor,  # [OUTPUTS], if BIASED
    sums: tl.tensor,  # written: the result [rows, OUTPUTS] if WHOLE, else parts [PARTS, rows, OUTPUTS]
    rows: tl.tensor,
    x_row: tl.tensor,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    LENGTH: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    COLUMN_BLOCK: tl.constexpr,
    TERMS: tl.constexpr,
    WHOLE: tl.constexpr,
    BIASED: tl.constexpr,
    WIDENED: tl.constexpr,
) -> None:
    """Compute a block of columns and rows, one program per block and, unless WHOLE, per part. If WHOLE, a program adds
    up the parts in the order of `_add_up`, so that both ways give the same bits."""
    column = tl.program_id(0) * COLUMN_BLOCK + tl.arange(0, COLUMN_BLOCK)
    row = (tl.program_id(1) * ROW_BLOCK + tl.arange(0, ROW_BLOCK)).to(tl.int64)
    first = tl.program_id(2)
    known = (column < OUTPUTS)[:, None]
    there = (row < rows)[:, None]
    term = tl.arange(0, TERMS)
    weights = weight + column.to(tl.int64)[:, None] * INPUTS + term[None, :]
    inputs = x + row[:, None] * x_row + term[None, :]
    total = tl.zeros([COLUMN_BLOCK, ROW_BLOCK], tl.float32)
    for part in range(first, PARTS if WHOLE else first + 1):
        found = tl.zeros([COLUMN_BLOCK, ROW_BLOCK], tl.float32)
        for start in range(part * LENGTH, (part + 1) * LENGTH, TERMS):
            inside = (term < INPUTS - start)[None, :]
            w = tl.load(weights + start, mask=known & inside, other=0.0)
            r = tl.load(inputs + start, mask=there & inside, other=0.0)
            if WIDENED:
                w = w.to(tl.float32)
                r = r.to(tl.float32)
            found = tl.dot(w, tl.trans(r), found)
        total += found
    if WHOLE:
        if BIASED:
            total += tl.load(bias + column, mask=column < OUTPUTS, other=0.0).to(tl.float32)[:, None]
        place = row
    else:
        place = first.to(tl.int64) * rows + row
    to = sums + place[None, :] * OUTPUTS + column[:, None]
    tl.store(to, total.to(sums.dtype.element_ty), mask=known & (row < rows)[None, :])


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(
    sums: tl.tensor,  # [PARTS, rows, OUTPUTS]
    bias: tl.tensor,  # [OUTPUTS], if BIASED
    out: tl.tensor,  # [rows, OUTPUTS], written
    rows: tl.tensor,
    OUTPUTS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    BIASED: tl.constexpr,
) -> None:
    """Add up the parts of one row in order, one program per block of its columns."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < OUTPUTS
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(PARTS):
        total += tl.load(sums + (part * rows + row) * OUTPUTS + column, mask=inside, other=0.0)
    if BIASED:
        total += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * OUTPUTS + column, total.to(out.dtype.element_ty), mask=inside)
