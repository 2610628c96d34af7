"""The compiled loop against attention in float64: grouped heads, windows, caps, widths, dtypes."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numba.core.runtime import rtsys
from numba.core.runtime._nrt_python import memsys_enable_stats
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.cpu.attention import (
    EVERYTHING,
    GROUP,
    PIECE,
    SHARED_FROM,
    RaggedAttention,
    RaggedMemory,
    Scratch,
    kernel,
    pieces,
    shares,
)
from specdec.engine.cpu.layout import RaggedBatch, RaggedPacker
from tests.engine.written_out import attention

SLOTS = 200
LONG, SHORT = 90, 12  # tokens of two texts


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    width: int
    value_width: int


SHAPES = [Shape(4, 4, 16, 16), Shape(6, 2, 16, 16), Shape(4, 1, 24, 8)]


def kinds() -> Iterator[Any]:
    """Yield every shape with every dtype. Each pair of widths is compiled for each dtype, which takes seconds: of the
    last pair, `make test` has float32 only."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{shape.heads}-{shape.kv_heads}-{shape.width}-{shape.value_width}-{str(dtype).split('.')[1]}"
            later = shape.width == 24 and dtype == torch.bfloat16
            yield pytest.param(shape, dtype, id=name, marks=[pytest.mark.verify] if later else [])


class Pass:
    """Two texts on scattered slots of a random memory. The step has the rest of the long text, with a branch in it, and
    all of the short one."""

    def __init__(self, shape: Shape, dtype: torch.dtype, *, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*sizes: int) -> Tensor:
            return spread * torch.randn(*sizes, generator=generator)

        self.keys = random(shape.kv_heads, SLOTS, shape.width).to(dtype)
        self.values = random(shape.kv_heads, SLOTS, shape.value_width).to(dtype)
        self.memory = RaggedMemory([self.keys], [self.values])
        slots = np.random.default_rng(0).permutation(np.arange(1, SLOTS))
        long, short, branch = np.split(slots[: LONG + SHORT + 2], (LONG, LONG + SHORT))
        packer = RaggedPacker()
        packer.add_path(long, packer.add_rows([0] * 20, LONG - 20, long[-20:]))
        packer.add_path(np.append(long[: LONG - 5], branch), packer.add_rows([0] * 2, LONG - 5, branch))
        packer.add_path(short, packer.add_rows([0] * SHORT, 0, short))
        self.batch = packer.pack()
        rows = len(self.batch.tokens)
        self.query = random(rows, shape.heads, shape.width)
        self.new_keys = random(rows, shape.kv_heads, shape.width).to(dtype)
        self.new_values = random(rows, shape.kv_heads, shape.value_width).to(dtype)
        self.scale = shape.width**-0.5

    def run(self, *, window: int | None = None, softcap: float | None = None) -> Tensor:
        return RaggedAttention(self.memory, self.batch).attend(
            0, self.query, self.new_keys, self.new_values, scale=self.scale, softcap=softcap, window=window
        )

    def reference(self, window: int | None = None, softcap: float | None = None) -> NDArray[np.float64]:
        """Return the expected output in float64, from the memory after the step."""
        keys, values = (kept.double().numpy().swapaxes(0, 1).copy() for kept in (self.keys, self.values))
        keys[self.batch.slots], values[self.batch.slots] = self.new_keys.double(), self.new_values.double()
        query = self.query.double().numpy()
        return attention(query, keys, values, paths(self.batch), scale=self.scale, window=window, softcap=softcap)


def paths(batch: RaggedBatch) -> list[NDArray[np.int64]]:
    return [batch.keys[f : f + p + 1] for f, p in zip(batch.first, batch.positions, strict=True)]


@pytest.mark.parametrize(("shape", "dtype"), kinds())
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("window", [None, 1, 17, 1000])
def test_it_is_attention(shape: Shape, dtype: torch.dtype, window: int | None, softcap: float | None) -> None:
    """The arithmetic is float32 for any memory dtype."""
    step = Pass(shape, dtype)
    want = step.reference(window, softcap)
    got = step.run(window=window, softcap=softcap)
    assert got.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), want, rtol=1e-4, atol=5e-6)


def test_windows_and_caps_matter() -> None:
    """Otherwise the comparison above could not fail."""
    step = Pass(SHAPES[1], torch.float32)
    plain = step.reference()
    assert np.abs(step.reference(window=17) - plain).max() > 0.1
    assert np.abs(step.reference(softcap=3.0) - plain).max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_large_scores(dtype: torch.dtype) -> None:
    """One key gets nearly all the weight, and nothing overflows. A score of 10,000 has an error of 10,000 times 2^-24
    for each of its 16 terms; a weight has the same error as its score, 0.01."""
    step = Pass(SHAPES[1], dtype, spread=30.0)
    np.testing.assert_allclose(step.run().numpy(), step.reference(), rtol=1e-2, atol=1e-2)


@pytest.mark.verify
def test_a_bfloat16_query_gives_a_bfloat16_output() -> None:
    step = Pass(SHAPES[1], torch.bfloat16)
    step.query = step.query.bfloat16()
    got = step.run()
    assert got.dtype == torch.bfloat16
    np.testing.assert_allclose(got.float().numpy(), step.reference(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize(
    ("shape", "dtype"), [(SHAPES[2], torch.float32), (SHAPES[1], torch.bfloat16)], ids=["float32", "bfloat16"]
)
def test_it_writes_the_new_rows_and_nothing_else(shape: Shape, dtype: torch.dtype) -> None:
    step = Pass(shape, dtype)
    keys, values = step.keys.clone(), step.values.clone()
    keys[:, step.batch.slots] = step.new_keys.transpose(0, 1)
    values[:, step.batch.slots] = step.new_values.transpose(0, 1)
    step.run()
    assert torch.equal(step.keys, keys)
    assert torch.equal(step.values, values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, softcap: float | None) -> None:
    """Alone, with the other rows in memory, and in another batch."""
    step = Pass(SHAPES[1], dtype)
    whole = step.run(softcap=softcap)
    for some in ([0], [5, 30], [33, 20, 2], list(range(20, 34))):
        packer = RaggedPacker()
        for row in some:
            position, slot = int(step.batch.positions[row]), int(step.batch.slots[row])
            packer.add_path(paths(step.batch)[row], [packer.add_row(0, position, slot)])
        part = RaggedAttention(step.memory, packer.pack()).attend(
            0,
            step.query[some],
            step.new_keys[some],
            step.new_values[some],
            scale=step.scale,
            softcap=softcap,
            window=None,
        )
        assert torch.equal(part, whole[some])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["query", "new_keys", "new_values"])
def test_what_is_no_number_stays_none(what: str, broken: float) -> None:
    """Exactly the rows that see it are not finite."""
    step = Pass(SHAPES[0], torch.float32)
    victim = 25  # in the short text, before its last rows
    getattr(step, what)[victim] = broken
    got = step.run()
    sees = [int(step.batch.slots[victim]) in path.tolist() for path in paths(step.batch)]
    assert sum(sees) == SHORT - int(step.batch.positions[victim]) > 1
    if what == "query":
        sees = [row == victim for row in range(len(sees))]
    assert [not bool(torch.isfinite(row).all()) for row in got] == sees


def test_slots_beyond_the_memory_are_refused() -> None:
    step = Pass(SHAPES[0], torch.float32)
    step.batch.keys[3] = SLOTS
    with pytest.raises(ValueError, match="slots must lie in"):
        step.run()


@pytest.mark.parametrize("threads", [2, 3, 16])
@pytest.mark.parametrize("rows", [1, 100], ids=["a long row", "many rows"])
def test_threads_that_share_the_heads_change_no_bit(threads: int, rows: int) -> None:
    kv_heads, width, length = 2, 16, 9100 // rows
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(kv_heads, rows * length + 1, width, generator=generator) for _ in range(2))
    query = torch.randn(rows, 2 * kv_heads, width, generator=generator)
    new = torch.randn(rows, kv_heads, width, generator=generator)
    packer = RaggedPacker()
    for row in range(rows):
        slots = np.arange(1 + row * length, 1 + (row + 1) * length)
        packer.add_path(slots, packer.add_rows([0], length - 1, slots[-1:]))
    batch = packer.pack()
    assert len(shares(batch.positions, pieces(batch.first, threads), kv_heads, width, threads)) == threads + 1

    def run(threads: int) -> Tensor:
        attention = RaggedAttention(RaggedMemory([keys.clone()], [values.clone()], threads), batch)
        return attention.attend(0, query, new, new, scale=0.25, softcap=None, window=None)

    assert torch.equal(run(threads), run(1))


@pytest.mark.parametrize("lengths", [[SHARED_FROM], [5000] * 2, [3000] * 4, [600] * 16, [9000, *[100] * 40]], ids=len)
@pytest.mark.parametrize("threads", [1, 2, 3, 16])
def test_shares_are_about_equal(lengths: list[int], threads: int) -> None:
    """Nothing is left out or done twice, and no share exceeds the mean by more than one head's keys."""
    kv_heads = 3
    cuts = shares(np.asarray(lengths) - 1, np.arange(len(lengths) + 1), kv_heads, 64, threads).tolist()
    assert (cuts[0], cuts[-1], len(cuts)) == (0, kv_heads * len(lengths), threads + 1)
    assert cuts == sorted(cuts)
    keys = np.repeat(lengths, kv_heads)
    most = max(keys[begin:end].sum() for begin, end in pairwise(cuts))
    assert most <= keys.sum() / threads + max(lengths)


@given(st.lists(st.integers(1, 3 * PIECE), min_size=1, max_size=20), st.integers(1, 16))
def test_pieces_are_of_one_path_and_no_longer_than_they_may_be(lengths: list[int], threads: int) -> None:
    first = np.repeat(np.arange(len(lengths)), lengths)
    cuts = pieces(first, threads)
    assert (cuts[0], cuts[-1]) == (0, sum(lengths))
    most = max(GROUP, min(PIECE, sum(lengths) // (4 * threads)))
    for begin, end in pairwise(cuts.tolist()):
        assert 0 < end - begin <= most
        assert len(set(first[begin:end])) == 1
    assert len(cuts) == 1 + sum(-(-length // most) for length in lengths)


@pytest.mark.parametrize("window", [None, 3, 40])
@pytest.mark.parametrize(
    "shape",
    [*SHAPES, pytest.param(Shape(2, 2, 64, 64), marks=pytest.mark.verify)],
    ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.width}",
)
def test_threads_that_share_the_rows_of_a_prompt_change_no_bit(shape: Shape, window: int | None) -> None:
    """Nor does the grouping of rows matter: each row alone, after the same text, has the same bits."""
    rows, length = 150, 400
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(shape.kv_heads, length + 1, shape.width, generator=generator)
    values = torch.randn(shape.kv_heads, length + 1, shape.value_width, generator=generator)
    query = torch.randn(rows, shape.heads, shape.width, generator=generator)
    slots = np.random.default_rng(0).permutation(np.arange(1, length + 1))
    own = torch.from_numpy(slots[-rows:])

    def run(some: list[int], threads: int) -> Tensor:
        packer = RaggedPacker()
        if len(some) == rows:
            packer.add_path(slots, packer.add_rows([0] * rows, length - rows, slots[-rows:]))
        else:
            for row in some:
                at = length - rows + row
                packer.add_path(slots[: at + 1], packer.add_rows([0], at, slots[at : at + 1]))
        attention = RaggedAttention(RaggedMemory([keys.clone()], [values.clone()], threads), packer.pack())
        new_keys, new_values = (kept[:, own[some]].transpose(0, 1) for kept in (keys, values))
        return attention.attend(0, query[some], new_keys, new_values, scale=0.25, softcap=None, window=window)

    whole = run(list(range(rows)), 1)
    for threads in (2, 3, 16):
        assert torch.equal(run(list(range(rows)), threads), whole)
    alone = [0, 1, 77, 149]
    assert torch.equal(run(alone, 1), whole[alone])


def test_few_keys_are_not_shared() -> None:
    assert shares(np.asarray([10, 20]), np.asarray([0, 1, 2]), 3, 64, 16).tolist() == [0, 6]


def test_no_share_allocates_memory() -> None:
    """A thread of the team with a failed allocation would silently skip its output."""
    memsys_enable_stats()
    random = np.random.default_rng(0)
    query, out = (random.standard_normal((8, 2, 16), np.float32) for _ in range(2))
    keys, values = (random.standard_normal((2, 8, 16), np.float32) for _ in range(2))
    rows = np.arange(8)

    def allocations(cuts: list[int]) -> int:
        scratch, cut = Scratch.of(len(cuts), 8, 16, 16), np.asarray(cuts)
        arguments = (query, keys, values, rows, np.zeros(8, int), rows, np.arange(9), EVERYTHING)
        kernel(16, 16)(*arguments, np.float32(0.5), np.float32(0), out, *scratch, cut)  # compiles it
        before = rtsys.get_allocation_stats().alloc
        kernel(16, 16)(*arguments, np.float32(0.5), np.float32(0), out, *scratch, cut)
        return int(rtsys.get_allocation_stats().alloc - before)

    assert allocations([0, 4, 8, 12, 16]) == allocations([0, 16])  # only those for arguments
