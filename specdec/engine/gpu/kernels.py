"""The Triton kernels between a decoder layer's matrix products, each a single pass over memory.

They compute the same functions as `cpu/loops.py`. Each row has its own programs, is computed in float32, and is rounded
once when stored, so that no row's arithmetic depends on another's. The host never waits for the GPU, and no shape
depends on a tensor's contents, so that a CUDA graph can contain these kernels.

Attention on a GPU multiplies the values of many keys by the weights of many rows. A weight is zero for a key that the
row does not see, but zero times NaN or infinity is NaN. So the non-finite numbers of a value vector are stored as zero,
and its key as NaN: rows that see the key get NaN, and other rows are not affected.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

INTERPRETED = bool(triton.knobs.runtime.interpret)
"""True if Triton's interpreter runs the kernels, as in tests without a GPU. It has no bfloat16 products, so these are
computed in float32."""

GATE_BLOCK = 1024
"""Numbers per program of the gate kernel."""


def add_and_normalise(residual: Tensor, update: Tensor, weight: Tensor, epsilon: float, out: Tensor) -> None:
    """Add the update to the residual [t, hidden] and write the RMS norm of the sum to `out` (Zhang and Sennrich 2019,
    "Root mean square layer normalization", eq. 4). All must be contiguous and of one dtype."""
    rows, hidden = residual.shape
    block = triton.next_power_of_2(hidden)
    warps = max(1, min(16, block // 512))
    _add_and_normalise[(rows,)](residual, update, weight, out, epsilon, HIDDEN=hidden, BLOCK=block, num_warps=warps)


def rotate(
    projected: Tensor,
    norms: Tensor | None,
    epsilon: float,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
) -> None:
    """Split rows into heads, rotate queries and keys by their position, write `query` and store keys and values.

    The rotation follows Su et al. 2021, "RoFormer", eq. 34, but pairs the two halves of a head instead of neighbours.
    `projected` is [t, (heads + 2 * kv_heads) * width]; cos and sin are float32 [positions, width / 2]; `query` is [t,
    heads, width]; keys and values are [slots, kv_heads, width], written at the rows' slots. `norms` [2, width] are the
    weights of the query and key RMS norms, if any.
    """
    rows, heads, width = query.shape
    kv_heads = keys.shape[1]
    _rotate[(rows, heads + kv_heads)](
        projected,
        projected if norms is None else norms,
        cos,
        sin,
        positions,
        slots,
        query,
        keys,
        values,
        epsilon,
        HEADS=heads,
        KV_HEADS=kv_heads,
        WIDTH=width,
        BLOCK=triton.next_power_of_2(width // 2),
        NORMALISED=norms is not None,
        num_warps=1,
    )


def gate(projected: Tensor, out: Tensor) -> None:
    """Write silu(gate) * up (Shazeer 2020, "GLU variants improve transformer", eq. 6) of `projected` [t, 2 * inner],
    gates first, to `out` [t, inner]."""
    rows, inner = out.shape
    _gate[(rows, triton.cdiv(inner, GATE_BLOCK))](projected, out, INNER=inner, BLOCK=GATE_BLOCK)


def store(key: Tensor, value: Tensor, slots: Tensor, keys: Tensor, values: Tensor) -> None:
    """Write new keys and values [t, kv_heads, width], each head contiguous, to their slots of the KV cache."""
    rows, kv_heads, width = key.shape
    value_width = value.shape[2]
    _store[(rows, kv_heads)](
        key,
        value,
        slots,
        keys,
        values,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        KV_HEADS=kv_heads,
        WIDTH=width,
        VALUE_WIDTH=value_width,
        BLOCK=triton.next_power_of_2(max(width, value_width)),
        num_warps=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_and_normalise(
    residual: tl.tensor,
    update: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    epsilon: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add and normalise one row, one program per row."""
    d = tl.arange(0, BLOCK)
    inside = d < HIDDEN
    offsets = tl.program_id(0).to(tl.int64) * HIDDEN + d
    x = tl.load(residual + offsets, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(update + offsets, mask=inside, other=0.0).to(tl.float32)
    stored = x.to(residual.dtype.element_ty)
    tl.store(residual + offsets, stored, mask=inside)
    x = stored.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / HIDDEN + epsilon)
    y = x * scale * tl.load(weight + d, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + offsets, y.to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _rotate(
    projected: tl.tensor,
    norms: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    positions: tl.tensor,
    slots: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    epsilon: tl.tensor,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORMALISED: tl.constexpr,
) -> None:
    """Rotate one query head, or rotate and store one key head and its value, one program per head of a row."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = WIDTH // 2
    d = tl.arange(0, BLOCK)
    inside = d < HALF
    own = projected + row * ((HEADS + 2 * KV_HEADS) * WIDTH) + head * WIDTH
    low = tl.load(own + d, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(own + HALF + d, mask=inside, other=0.0).to(tl.float32)
    if NORMALISED:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / WIDTH + epsilon)
        weights = norms + tl.where(head < HEADS, 0, WIDTH)
        low *= scale * tl.load(weights + d, mask=inside, other=0.0).to(tl.float32)
        high *= scale * tl.load(weights + HALF + d, mask=inside, other=0.0).to(tl.float32)
    angle = tl.load(positions + row).to(tl.int64) * HALF + d
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    turned_low = low * c - high * s
    turned_high = high * c + low * s
    if head < HEADS:
        to = query + (row * HEADS + head) * WIDTH
        tl.store(to + d, turned_low.to(query.dtype.element_ty), mask=inside)
        tl.store(to + HALF + d, turned_high.to(query.dtype.element_ty), mask=inside)
    else:
        there = (tl.load(slots + row).to(tl.int64) * KV_HEADS + head - HEADS) * WIDTH
        low_value = tl.load(own + KV_HEADS * WIDTH + d, mask=inside, other=0.0)
        high_value = tl.load(own + KV_HEADS * WIDTH + HALF + d, mask=inside, other=0.0)
        finite = _all_finite(low_value) & _all_finite(high_value)
        turned_low = tl.where(finite, turned_low, float("nan"))
        turned_high = tl.where(finite, turned_high, float("nan"))
        tl.store(keys + there + d, turned_low.to(keys.dtype.element_ty), mask=inside)
        tl.store(keys + there + HALF + d, turned_high.to(keys.dtype.element_ty), mask=inside)
        tl.store(values + there + d, _finite_or_zero(low_value).to(values.dtype.element_ty), mask=inside)
        tl.store(values + there + HALF + d, _finite_or_zero(high_value).to(values.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _gate(projected: tl.tensor, out: tl.tensor, INNER: tl.constexpr, BLOCK: tl.constexpr) -> None:
    """Compute one block of a row, one program per block."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = d < INNER
    gates = tl.load(projected + row * (2 * INNER) + d, mask=inside, other=0.0).to(tl.float32)
    ups = tl.load(projected + row * (2 * INNER) + INNER + d, mask=inside, other=0.0).to(tl.float32)
    e = tl.exp(-tl.abs(gates))
    sigmoid = tl.where(gates >= 0, 1.0, e) / (1.0 + e)
    tl.store(out + row * INNER + d, (gates * sigmoid * ups).to(out.dtype.element_ty), mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _store(
    key: tl.tensor,
    value: tl.tensor,
    slots: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_row: tl.tensor,
    key_head: tl.tensor,
    value_row: tl.tensor,
    value_head: tl.tensor,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Store the key and value of one head of a row, one program per head."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    d = tl.arange(0, BLOCK)
    k = tl.load(key + row * key_row + head * key_head + d, mask=d < WIDTH, other=0.0).to(tl.float32)
    v = tl.load(value + row * value_row + head * value_head + d, mask=d < VALUE_WIDTH, other=0.0)
    v = v.to(values.dtype.element_ty)
    there = tl.load(slots + row).to(tl.int64) * KV_HEADS + head
    k = tl.where(_all_finite(v), k, float("nan"))
    tl.store(keys + there * WIDTH + d, k.to(keys.dtype.element_ty), mask=d < WIDTH)
    tl.store(values + there * VALUE_WIDTH + d, _finite_or_zero(v).to(values.dtype.element_ty), mask=d < VALUE_WIDTH)


@triton.jit  # type: ignore[untyped-decorator]
def _all_finite(x: tl.tensor) -> tl.tensor:
    return tl.sum((tl.abs(x.to(tl.float32)) < float("inf")).to(tl.int32), 0) == x.shape[0]


@triton.jit  # type: ignore[untyped-decorator]
def _finite_or_zero(x: tl.tensor) -> tl.tensor:
    wide = x.to(tl.float32)
    return tl.where(tl.abs(wide) < float("inf"), wide, 0.0)
