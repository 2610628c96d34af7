"""The tiled kernels against attention in float64, and bit by bit in different batches.

Without a GPU they run under Triton's interpreter, tile by tile in NumPy: shapes are small, and bfloat16 products are
computed from the same numbers in float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.gpu.layout import SplitKvBatch, SplitKvPacker, tile_rows_for
from specdec.engine.gpu.staging import SplitKvTensors
from specdec.engine.kv.slots import Slots
from specdec.engine.partials import SPLIT
from tests.engine.written_out import attention

pytest.importorskip("triton", reason="the extra `cuda` is not installed")
from specdec.engine.gpu.attention import SPLITS_AT_ONCE, SplitKvAttention, SplitKvMemory

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SLOTS = 600
LONG, SHORT = SPLIT + 70, 2
"""Tokens of two texts; the long one has two splits."""

ROUNDING = {torch.float32: 1e-4, torch.float16: 2**-8, torch.bfloat16: 2**-5}
"""Absolute rounding error of weights and output, whose values are around one."""

DTYPES = list(ROUNDING)


@dataclass(frozen=True)
class Shape:
    heads: int
    kv_heads: int
    width: int
    value_width: int

    @property
    def tile_rows(self) -> int:
        return tile_rows_for(self.heads // self.kv_heads)


MANY, GROUPED, ODD = Shape(2, 2, 16, 16), Shape(4, 2, 16, 16), Shape(3, 1, 24, 8)
SHAPES = [MANY, GROUPED, ODD, Shape(1, 1, 80, 96)]


class Pass:
    """Two texts on scattered slots of a random memory. The step has some rows of the long text and a branch in it, on
    both sides of the end of a split, and all of the short text."""

    def __init__(self, shape: Shape, dtype: torch.dtype = torch.float32, *, spread: float = 1.0) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*sizes: int) -> Tensor:
            return (spread * torch.randn(*sizes, generator=generator)).to(DEVICE, dtype)

        self.shape = shape
        self.keys = random(SLOTS, shape.kv_heads, shape.width)
        self.values = random(SLOTS, shape.kv_heads, shape.value_width)
        slots = np.random.default_rng(0).permutation(np.arange(1, SLOTS))
        long, short, branch = np.split(slots[: LONG + SHORT + 2], (LONG, LONG + SHORT))
        self.texts: list[Slots] = []
        packer = SplitKvPacker(tile_rows=shape.tile_rows)
        fork = np.append(long[: SPLIT - 1], branch)
        tail = packer.add_rows([0] * 2, SPLIT - 2, long[SPLIT - 2 : SPLIT])
        packer.add_path(long, [*tail, packer.add_row(0, LONG - 1, int(long[-1]))])
        packer.add_path(fork, packer.add_rows([0] * 2, SPLIT - 1, branch))
        packer.add_path(short, packer.add_rows([0] * SHORT, 0, short))
        self.batch = packer.pack()
        self.texts = [
            text[: position + 1]
            for text, position in zip([long] * 3 + [fork] * 2 + [short] * SHORT, self.batch.positions, strict=True)
        ]
        rows = len(self.batch.tokens)
        self.query = random(rows, shape.heads, shape.width)
        self.new_keys = random(rows, shape.kv_heads, shape.width)
        self.new_values = random(rows, shape.kv_heads, shape.value_width)
        self.scale = shape.width**-0.5

    def run(self, *, window: int | None = None, softcap: float | None = None) -> Tensor:
        return self.attend(self.batch, range(len(self.texts)), window=window, softcap=softcap)

    def attend(
        self, batch: SplitKvBatch, rows: Sequence[int], *, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """Run attention on a batch of some of the rows."""
        memory = SplitKvMemory([self.keys], [self.values], batch.partials, self.shape.heads)
        some = list(rows)
        return SplitKvAttention(memory, SplitKvTensors.of(batch, DEVICE)).attend(
            0,
            self.query[some],
            self.new_keys[some],
            self.new_values[some],
            scale=self.scale,
            softcap=softcap,
            window=window,
        )

    def reference(self, window: int | None = None, softcap: float | None = None) -> NDArray[np.float64]:
        """Return the expected output in float64, from the memory after the step."""
        keys, values = (_double(pool).copy() for pool in (self.keys, self.values))
        keys[self.batch.slots], values[self.batch.slots] = _double(self.new_keys), _double(self.new_values)
        query = _double(self.query)
        return attention(query, keys, values, self.texts, scale=self.scale, window=window, softcap=softcap)


def _double(tensor: Tensor) -> NDArray[np.float64]:
    return tensor.double().cpu().numpy()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s.heads}-{s.kv_heads}-{s.width}-{s.value_width}")
def test_it_is_attention(shape: Shape, dtype: torch.dtype) -> None:
    step = Pass(shape, dtype)
    got = step.run()
    assert got.dtype == dtype
    np.testing.assert_allclose(_double(got), step.reference(), atol=ROUNDING[dtype])


@pytest.mark.parametrize(("window", "softcap"), [(None, 3.0), (1, None), (17, 3.0), (100, None), (1000, 3.0)])
def test_windows_and_caps(window: int | None, softcap: float | None) -> None:
    """Windows of one token, within one split, across two, and over everything."""
    step = Pass(ODD)
    got = step.run(window=window, softcap=softcap)
    np.testing.assert_allclose(_double(got), step.reference(window, softcap), atol=1e-4)


def test_windows_and_caps_matter() -> None:
    """Otherwise the comparison above could not fail."""
    step = Pass(ODD)
    plain = step.reference()
    assert np.abs(step.reference(window=100) - plain).max() > 0.1
    assert np.abs(step.reference(softcap=3.0) - plain).max() > 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_large_scores(dtype: torch.dtype) -> None:
    """One key gets all the weight, and nothing overflows."""
    step = Pass(MANY, dtype, spread=30.0)
    np.testing.assert_allclose(_double(step.run()), step.reference(), atol=30 * ROUNDING[dtype])


@pytest.mark.parametrize(
    ("dtype", "window"), [(torch.float32, None), (torch.float16, None), (torch.bfloat16, 100)], ids=str
)
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype, window: int | None) -> None:
    """As part of a prompt with a branch in it, alone, and among other texts in another order."""
    step = Pass(GROUPED, dtype)
    whole = step.run(window=window)
    for some in ([2], [6, 4, 0, 2]):
        packer = SplitKvPacker(tile_rows=step.shape.tile_rows)
        for row in some:
            text = step.texts[row]
            packer.add_path(text, [packer.add_row(0, len(text) - 1, int(text[-1]))])
        assert torch.equal(step.attend(packer.pack(), some, window=window), whole[some])


def test_a_text_of_many_splits() -> None:
    """The text has more splits than one iteration adds up, and its row shares none of its tiles."""
    length = (SPLITS_AT_ONCE + 1) * SPLIT + 5
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(length + 1, 1, 16, generator=generator).to(DEVICE) for _ in range(2))
    query = torch.randn(1, 2, 16, generator=generator).to(DEVICE)
    slots = np.random.default_rng(0).permutation(np.arange(1, length + 1))
    packer = SplitKvPacker(tile_rows=32)
    packer.add_path(slots, packer.add_rows([0], length - 1, slots[-1:]))
    batch = packer.pack()
    memory = SplitKvMemory([keys], [values], batch.partials, 2)
    last = torch.from_numpy(slots[-1:]).to(DEVICE)
    for window in (None, 700):
        own = slots[-window:] if window else slots
        got = SplitKvAttention(memory, SplitKvTensors.of(batch, DEVICE)).attend(
            0, query, keys[last], values[last], scale=0.25, softcap=None, window=window
        )
        scores = _double(keys)[own, 0] @ _double(query)[0].T * 0.25
        weights = np.exp(scores - scores.max(0))
        want = (weights / weights.sum(0)).T @ _double(values)[own, 0]
        np.testing.assert_allclose(_double(got)[0], want, atol=1e-4)


def test_it_writes_the_new_rows_and_nothing_else() -> None:
    """Inputs may have any strides: in transformers, heads come before rows."""
    step = Pass(ODD, torch.bfloat16)
    step.new_keys = step.new_keys.transpose(0, 1).contiguous().transpose(0, 1)
    step.query = step.query.transpose(1, 2).contiguous().transpose(1, 2)
    keys, values = step.keys.clone(), step.values.clone()
    keys[step.batch.slots], values[step.batch.slots] = step.new_keys, step.new_values
    got = step.run()
    assert torch.equal(step.keys, keys)
    assert torch.equal(step.values, values)
    np.testing.assert_allclose(_double(got), step.reference(), atol=ROUNDING[torch.bfloat16])


@pytest.mark.parametrize("broken", [math.nan, math.inf])
@pytest.mark.parametrize("what", ["query", "new_keys", "new_values"])
@pytest.mark.parametrize("victim", [1, 5], ids=["of the long text", "of the short one"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # from NumPy, which the interpreter uses
def test_what_is_no_number_stays_none(what: str, broken: float, victim: int) -> None:
    """Exactly the rows that see it are not finite, even if other rows read it with zero weight."""
    step = Pass(MANY)
    getattr(step, what)[victim] = broken
    got = step.run()
    sees = [int(step.batch.slots[victim]) in text.tolist() for text in step.texts]
    assert 1 < sum(sees) < len(sees)
    if what == "query":
        sees = [row == victim for row in range(len(sees))]
    assert [not bool(torch.isfinite(row).all()) for row in got] == sees


def test_waves_of_rows_have_the_same_bits() -> None:
    """With memory for fewer partials than the rows have together."""
    step = Pass(GROUPED)
    packer = SplitKvPacker(tile_rows=step.shape.tile_rows, most_partials=8)
    rows = [packer.add_row(0, len(text) - 1, int(text[-1])) for text in step.texts]
    for row, text in zip(rows, step.texts, strict=True):
        packer.add_path(text, [row])
    batch = packer.pack()
    assert len(batch.waves) == 2
    assert batch.partials < step.batch.partials
    assert torch.equal(step.attend(batch, rows), step.run())


def test_batches_and_heads_beyond_the_memory_are_refused() -> None:
    step = Pass(MANY)
    memory = SplitKvMemory([step.keys], [step.values], 4, 2)
    extents, sums = memory.found(2, 16)
    assert (extents.shape, sums.shape) == ((2, 4, 2), (4, 2, 16))
    with pytest.raises(ValueError, match="there is no memory for 3 heads of width 16"):
        memory.found(3, 16)
    with pytest.raises(ValueError, match=f"there is memory for 4 partials, the batch has {step.batch.partials}"):
        SplitKvAttention(memory, SplitKvTensors.of(step.batch, DEVICE))
