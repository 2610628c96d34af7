"""Attention over a split-KV batch on a GPU, as Triton kernels.

One program of the first kernel computes one split-KV tile for the query heads of one key head: scores, softmax and
values for a few keys at a time (Dao et al. 2022, "FlashAttention", alg. 1), gathering keys and values from their slots.
Its result for a row and split is a partial: the largest score, the sum of weights and the weighted sum of values, in
float32. A second kernel reduces the partials of each row in order of position. The split along keys follows Dao et al.
2023, "Flash-Decoding".

Products take the stored dtype and accumulate in float32; all else is float32. A row's sums are unaffected by keys that
it does not see. With the layout's fixed splits, a row's bits do not depend on other rows (`gpu/layout.py`). NaNs and
infinities are handled when keys and values are stored (`gpu/kernels.py`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.engine.gpu.kernels import INTERPRETED, store
from specdec.engine.gpu.layout import TILE_ROWS
from specdec.engine.gpu.staging import SplitKvTensors
from specdec.engine.partials import SPLIT, numbers_of_a_partial

TILES = (64, 32, 16)
"""Candidates for the number of keys per read; the first whose keys and values fit into STAGE_BYTES is used. 64 is not a
candidate for float32, whose products need many registers."""

STAGE_BYTES = 1 << 15
"""Upper bound on the bytes of keys and values per read. Heads of width up to 128 then fit into the 99 KiB of shared
memory per block on the smallest GPUs with tensor cores for bfloat16. Heads of width 256 fit there too, except in
float32, which needs a GPU with 164 KiB."""

PRECISION = tl.constexpr("tf32x3")
"""Precision of float32 products: three tensor-core products each, nearly as exact as float32 itself. Exact
products ("ieee") do not use tensor cores, and need more registers than a GPU has."""

SPLITS_AT_ONCE = 16
"""Splits per read of the second kernel."""


class Tiling(NamedTuple):
    """Launch parameters of the first kernel for heads of one shape."""

    block: int  # key width, padded to a power of two
    value_block: int  # value width, padded to a power of two
    tile: int  # keys per read
    warps: int
    stages: int  # reads of `tile` keys in flight

    @classmethod
    def of(cls, width: int, value_width: int, item_bytes: int) -> Tiling:
        """Choose the parameters for keys and values of these widths with `item_bytes` per number."""
        block, value_block = (triton.next_power_of_2(max(16, size)) for size in (width, value_width))
        key_bytes = (block + value_block) * item_bytes
        wide = item_bytes > 2
        tile = next((tile for tile in TILES[wide:] if tile * key_bytes <= STAGE_BYTES), TILES[-1])
        room = (1 if wide else 2) * STAGE_BYTES  # the compiler needs shared memory of its own for float32 products
        stages = 1 if tile == TILES[-1] else min(3, room // (tile * key_bytes))
        return cls(block, value_block, tile, warps=4 if tile == TILES[0] else 8, stages=stages)


@dataclass
class SplitKvMemory:
    """Keys and values of all layers, each [slots, kv_heads, width], and memory for `partials` partials of `heads` query
    heads. It never moves: CUDA graphs write to it."""

    keys: list[Tensor]
    values: list[Tensor]
    partials: int
    heads: int
    _found: Tensor = field(init=False)

    def __post_init__(self) -> None:
        numbers = numbers_of_a_partial(self.heads, max(values.shape[2] for values in self.values))
        self._found = torch.empty(self.partials * numbers, dtype=torch.float32, device=self.keys[0].device)

    def found(self, heads: int, value_width: int) -> tuple[Tensor, Tensor]:
        """Return the memory for largest scores and sums of weights [2, partials, heads], and for weighted values
        [partials, heads, value_width]."""
        count = self.partials * heads
        if self.partials * numbers_of_a_partial(heads, value_width) > len(self._found):
            raise ValueError(f"there is no memory for {heads} heads of width {value_width}")
        extents = self._found[: 2 * count].view(2, self.partials, heads)
        return extents, self._found[2 * count : count * (2 + value_width)].view(self.partials, heads, value_width)


class SplitKvAttention:
    """The attention of one forward pass, called by the model's layers. Raises ValueError if the memory has too little
    room for the batch's partials."""

    def __init__(self, memory: SplitKvMemory, batch: SplitKvTensors) -> None:
        if batch.partials > memory.partials:
            raise ValueError(f"there is memory for {memory.partials} partials, the batch has {batch.partials}")
        self.batch = batch
        self._memory = memory

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        key = key if key.stride(2) == 1 else key.contiguous()
        value = value if value.stride(2) == 1 else value.contiguous()
        store(key, value, self.batch.slots, *self.memory_of(layer))
        out = query.new_empty((*query.shape[:2], value.shape[2]))
        self.read(layer, query, out, scale=scale, softcap=softcap, window=window)
        return out

    def memory_of(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a layer, each [slots, kv_heads, width]."""
        return self._memory.keys[layer], self._memory.values[layer]

    def read(
        self, layer: int, query: Tensor, out: Tensor, *, scale: float, softcap: float | None, window: int | None
    ) -> None:
        """Write the attention of `query` [t, heads, width] to `out` [t, heads, value_width], contiguous. The batch's
        own keys and values must already be stored."""
        keys, values = self.memory_of(layer)
        batch = self.batch
        query = query if query.stride(2) == 1 else query.contiguous()
        heads, width = query.shape[1:]
        kv_heads, value_width = keys.shape[1], values.shape[2]
        shared = heads // kv_heads
        tile_rows = batch.tile_row_indices.shape[1]
        extents, sums = self._memory.found(heads, value_width)
        tiling = Tiling.of(width, value_width, keys.element_size())
        for wave in batch.waves:
            _read[(wave.tiles.stop - wave.tiles.start, kv_heads)](
                query,
                keys,
                values,
                batch.tile_counts[wave.tiles],
                batch.tile_splits[wave.tiles],
                batch.tile_row_indices[wave.tiles],
                batch.tile_keys[wave.tiles],
                batch.positions,
                batch.first_partials,
                extents[0],
                extents[1],
                sums,
                query.stride(0),
                query.stride(1),
                scale,
                softcap or 0.0,
                KV_HEADS=kv_heads,
                SHARED=shared,
                TILE_CAPACITY=tile_rows,
                WIDTH=width,
                VALUE_WIDTH=value_width,
                ROWS=triton.next_power_of_2(max(TILE_ROWS, tile_rows * shared)),
                BLOCK=tiling.block,
                VALUE_BLOCK=tiling.value_block,
                SPLIT=SPLIT,
                TILE=tiling.tile,
                CAPPED=softcap is not None,
                WINDOW=window or 0,
                WIDENED=INTERPRETED and keys.dtype == torch.bfloat16,
                num_warps=tiling.warps,
                num_stages=tiling.stages,
            )
            _add_up[(wave.rows.stop - wave.rows.start, heads)](
                extents[0],
                extents[1],
                sums,
                batch.positions[wave.rows],
                batch.first_partials[wave.rows],
                out[wave.rows],
                HEADS=heads,
                VALUE_WIDTH=value_width,
                VALUE_BLOCK=tiling.value_block,
                SPLIT=SPLIT,
                AT_ONCE=SPLITS_AT_ONCE,
                WINDOW=window or 0,
            )


@triton.jit  # type: ignore[untyped-decorator]
def _read(
    query: tl.tensor,  # [t, heads, width]
    keys: tl.tensor,  # [slots, kv_heads, width]
    values: tl.tensor,  # [slots, kv_heads, value_width]
    tile_counts: tl.tensor,
    tile_splits: tl.tensor,
    tile_row_indices: tl.tensor,
    tile_keys: tl.tensor,
    positions: tl.tensor,
    first_partials: tl.tensor,
    largest: tl.tensor,  # [partials, heads], written
    totals: tl.tensor,  # [partials, heads], written
    sums: tl.tensor,  # [partials, heads, value_width], written
    query_row: tl.tensor,
    query_head: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    KV_HEADS: tl.constexpr,
    SHARED: tl.constexpr,
    TILE_CAPACITY: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    TILE: tl.constexpr,
    CAPPED: tl.constexpr,
    WINDOW: tl.constexpr,
    WIDENED: tl.constexpr,
) -> None:
    """Compute the partials of one split-KV tile and key head, one program per pair. It is one function, since Triton
    keeps shared state (keys, maxima, sums) in the registers of one program."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    count = tl.load(tile_counts + tile)
    if count == 0:
        return
    split = tl.load(tile_splits + tile)
    start = split * SPLIT
    line = tl.arange(0, ROWS)  # rows of the product: the tile's first row with each of its heads, then the next row
    place = line // SHARED
    head = kv_head * SHARED + line % SHARED
    inside = place < count
    row = tl.load(tile_row_indices + tile * TILE_CAPACITY + place, mask=inside, other=0).to(tl.int64)
    position = tl.load(positions + row, mask=inside, other=-1).to(tl.int32)  # position -1: sees nothing
    d = tl.arange(0, BLOCK)
    dv = tl.arange(0, VALUE_BLOCK)
    q = tl.load(
        query + row[:, None] * query_row + head[:, None] * query_head + d[None, :],
        mask=inside[:, None] & (d < WIDTH)[None, :],
        other=0.0,
    ).to(keys.dtype.element_ty)
    if WIDENED:
        q = q.to(tl.float32)

    first_chunk = 0
    if WINDOW:
        lowest = tl.min(tl.where(inside, position, 2147483647), 0) - (WINDOW - 1) - start
        first_chunk = tl.maximum(lowest, 0) // TILE
    last_chunk = tl.cdiv(tl.minimum(tl.max(position, 0) + 1 - start, SPLIT), TILE)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sum_ = tl.zeros([ROWS, VALUE_BLOCK], tl.float32)
    for chunk in range(first_chunk, last_chunk):
        n = chunk * TILE + tl.arange(0, TILE)
        slot = tl.load(tile_keys + tile * SPLIT + n).to(tl.int64) * KV_HEADS + kv_head
        k = tl.load(keys + slot[None, :] * WIDTH + d[:, None], mask=(d < WIDTH)[:, None], other=0.0)
        v = tl.load(values + slot[:, None] * VALUE_WIDTH + dv[None, :], mask=(dv < VALUE_WIDTH)[None, :], other=0.0)
        if WIDENED:
            k = k.to(tl.float32)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        if CAPPED:
            scores = (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0) * softcap  # tanh
        seen = start + n[None, :] <= position[:, None]
        if WINDOW:
            seen &= start + n[None, :] > position[:, None] - WINDOW
        scores = tl.where(seen, scores, float("-inf"))
        new = tl.maximum(best, tl.max(scores, 1))
        level = tl.where(new == float("-inf"), 0.0, new)  # a row that has seen no key yet has zero weights
        # Online softmax: earlier sums are rescaled to the new maximum.
        weights = tl.exp(scores - level[:, None])
        kept = tl.exp(best - level)
        total = total * kept + tl.sum(weights, 1)
        stored = weights.to(values.dtype.element_ty)
        if WIDENED:
            stored = stored.to(tl.float32)
            v = v.to(tl.float32)
        sum_ = tl.dot(stored, v, sum_ * kept[:, None], input_precision=PRECISION)
        best = new

    partial = tl.load(first_partials + row, mask=inside, other=0).to(tl.int64) + split
    there = partial * (KV_HEADS * SHARED) + head
    tl.store(largest + there, best, mask=inside)
    tl.store(totals + there, total, mask=inside)
    tl.store(
        sums + there[:, None] * VALUE_WIDTH + dv[None, :],
        sum_,
        mask=inside[:, None] & (dv < VALUE_WIDTH)[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator]
def _add_up(
    largest: tl.tensor,  # [partials, heads]
    totals: tl.tensor,
    sums: tl.tensor,  # [partials, heads, value_width]
    positions: tl.tensor,
    first_partials: tl.tensor,
    out: tl.tensor,  # [t, heads, value_width], written
    HEADS: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    VALUE_BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    AT_ONCE: tl.constexpr,
    WINDOW: tl.constexpr,
) -> None:
    """Reduce the partials of one row and head, one program per pair. The row's position alone determines the splits and
    their order."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = tl.load(positions + row).to(tl.int32)
    first = tl.load(first_partials + row).to(tl.int64)
    dv = tl.arange(0, VALUE_BLOCK)
    inside = dv < VALUE_WIDTH
    begin = 0
    if WINDOW:
        begin = tl.maximum(position - (WINDOW - 1), 0) // SPLIT
    end = position // SPLIT + 1
    best = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    sum_ = tl.zeros([VALUE_BLOCK], tl.float32)
    for block in range(begin, end, AT_ONCE):
        split = block + tl.arange(0, AT_ONCE)
        there = (first + split) * HEADS + head
        mine = split < end
        peaks = tl.load(largest + there, mask=mine, other=float("-inf"))
        found = tl.load(totals + there, mask=mine, other=0.0)
        weighted = tl.load(
            sums + there[:, None] * VALUE_WIDTH + dv[None, :], mask=mine[:, None] & inside[None, :], other=0.0
        )
        new = tl.maximum(best, tl.max(peaks, 0))
        shares = tl.exp(peaks - new)
        kept = tl.exp(best - new)
        total = total * kept + tl.sum(found * shares, 0)
        sum_ = sum_ * kept + tl.sum(weighted * shares[:, None], 0)
        best = new
    result = sum_ / total
    tl.store(out + (row * HEADS + head) * VALUE_WIDTH + dv, result.to(out.dtype.element_ty), mask=inside)
