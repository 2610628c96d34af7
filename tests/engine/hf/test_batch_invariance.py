"""Measured row counts, tiling, and the check at start, on layers and engines with known faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PretrainedConfig

from specdec.engine.batch import PackedBatch
from specdec.engine.batch_independence import rows_are_independent
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf import batch_invariance
from specdec.engine.hf.batch_invariance import TiledLinear, find, make_exact, tile, untile
from specdec.engine.hf.linear import PackedLinear, can_pack
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.row_counts import CANDIDATES, InvariantRowCounts, ShapeRowCounts
from tests.engine import odd_models
from tests.models import make
from tests.verifier_service.fakes import BAD, TextEngine, ThreadedTextEngine


class Fickle(torch.nn.Linear):
    """A layer whose bits depend on a function of the number of rows."""

    def __init__(self, kind: Callable[[int], int], inputs: int = 8, outputs: int = 4) -> None:
        super().__init__(inputs, outputs)
        self.kind = kind
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        rows = x.shape[-2]
        self.seen.append(rows)
        return x[..., : self.out_features] * (1.0 + self.kind(rows) * 2.0**-20)


def members(condition: Callable[[int], bool]) -> tuple[int, ...]:
    return tuple(count for count in CANDIDATES if condition(count))


def found(*layers: Fickle, threads: Sequence[int] = (1,)) -> ShapeRowCounts:
    classes = ShapeRowCounts.made_up_of(find(layers, "cpu", threads))
    assert classes is not None
    return classes


def own(classes: ShapeRowCounts) -> tuple[int, ...]:
    """Return the row counts of the only shape."""
    (rows,) = classes.products.values()
    return rows.counts


class TestFind:
    def test_a_steady_layer_has_one_class(self) -> None:
        classes = found(Fickle(lambda rows: 0))
        assert own(classes) == classes.batch.counts == CANDIDATES

    @pytest.mark.parametrize("limit", [8, 24, 100])
    def test_the_largest_of_two_classes(self, limit: int) -> None:
        low, high = members(lambda rows: rows <= limit), members(lambda rows: rows > limit)
        assert own(found(Fickle(lambda rows: int(rows > limit)))) == max(low, high, key=len)

    def test_a_class_may_have_gaps(self) -> None:
        classes = found(Fickle(lambda rows: int(rows in (1, 7, 9))))
        assert own(classes) == members(lambda rows: rows not in (1, 7, 9))
        assert classes.batch == classes.products[8, 4]  # 7 = 6 and a remainder that is no such count

    def test_every_shape_has_its_own(self) -> None:
        """One shape lacks small row counts, the other large ones and composes them from several products."""
        few, many = Fickle(lambda rows: int(rows < 3)), Fickle(lambda rows: int(rows > 100), outputs=5)
        classes = found(few, many)
        assert classes.batch.counts == members(lambda rows: rows >= 3)
        assert classes.tiles((8, 4), 512) == [512]
        assert classes.tiles((8, 5), 512) == [96, 96, 96, 96, 96, 32]
        swapped = ShapeRowCounts(classes.batch, {(8, 4): classes.products[8, 5], (8, 5): classes.products[8, 4]})
        assert str(classes) != str(swapped)
        assert str(classes).startswith(f"3..512of{len(CANDIDATES) - 2}-")

    def test_layers_of_a_shape_agree_with_and_without_a_bias(self) -> None:
        without = Fickle(lambda rows: int(rows < 3))
        without.register_parameter("bias", None)
        classes = found(Fickle(lambda rows: int(rows > 100)), without)
        assert own(classes) == members(lambda rows: 3 <= rows <= 100)

    def test_one_layer_of_a_shape_is_enough(self) -> None:
        layers = [Fickle(lambda rows: 0), Fickle(lambda rows: 0), Fickle(lambda rows: 0, inputs=9)]
        found(*layers)
        assert [bool(layer.seen) for layer in layers] == [False, True, True]

    def test_where_no_two_numbers_agree_each_row_is_a_tile(self) -> None:
        classes = found(Fickle(lambda rows: rows))
        assert own(classes) == (1,)
        assert classes.tiles((8, 4), 5) == [1] * 5

    def test_shapes_that_share_no_number_of_rows(self) -> None:
        """256 and 512 rows cannot be composed of threes and nines."""
        large = Fickle(lambda rows: 0 if rows in (256, 512) else rows)
        small = Fickle(lambda rows: 0 if rows in (3, 9) else rows, outputs=5)
        assert ShapeRowCounts.made_up_of(find([large, small], "cpu", [1])) is None

    def test_some_outputs_of_a_wide_layer_in_every_place_of_a_tile(self) -> None:
        stride = batch_invariance._stride(262_144)
        assert 262_144 / stride <= batch_invariance.PROBED_OUTPUTS
        assert {place % 128 for place in range(0, 262_144, stride)} == set(range(128))
        assert batch_invariance._stride(32_000) == 1

    def test_real_layers(self) -> None:
        """At the invariant row counts of this machine, whatever they are, all rows have equal bits."""
        torch.manual_seed(0)
        layer = torch.nn.Linear(64, 96)
        (rows,) = find([layer], "cpu", [1]).values()
        x = torch.randn(600, 64)
        with torch.inference_mode():
            whole = layer(x[: rows.counts[-1]])
            for count in rows.counts:
                assert torch.equal(layer(x[:count]), whole[:count])

    def test_threads_must_agree(self) -> None:
        """On a processor with matrix units a wide layer splits its sums differently with one thread, for some row
        counts."""
        before = torch.get_num_threads()
        try:
            steady = Fickle(lambda rows: int(32 < rows < 256) * rows * (torch.get_num_threads() == 1))
            other = Fickle(lambda rows: torch.get_num_threads() * (rows > 100), outputs=5)
            classes = found(steady, other, threads=(2, 1))
            assert torch.get_num_threads() == 2
            assert classes.products[8, 4].counts == members(lambda rows: not 32 < rows < 256)
            assert classes.products[8, 5].counts == members(lambda rows: rows <= 100)
        finally:
            torch.set_num_threads(before)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    def test_real_layers_with_any_number_of_threads(self, dtype: torch.dtype) -> None:
        """In tall and wide layers, packed as in the engine, a row has the same bits in every batch."""
        if not can_pack(dtype):
            pytest.skip(f"no packed products of {dtype} here")
        torch.manual_seed(0)
        before = torch.get_num_threads()
        try:
            for inputs, outputs in ((1024, 384), (7936, 384), (384, 2048)):
                layer = PackedLinear(torch.nn.Linear(inputs, outputs, False).to(dtype).requires_grad_(False))
                classes = ShapeRowCounts.made_up_of(find([layer], "cpu", (2, 1)))
                assert classes is not None
                tiled = TiledLinear(layer, classes)
                x = torch.randn(512, inputs).to(dtype)
                with torch.inference_mode():
                    whole = tiled(x)
                    for threads in (2, 1):
                        torch.set_num_threads(threads)
                        for count in classes.batch.counts:
                            assert torch.equal(tiled(x[:count]), whole[:count]), (inputs, outputs, threads, count)
        finally:
            torch.set_num_threads(before)


def of(layer: torch.nn.Linear, counts: tuple[int, ...]) -> ShapeRowCounts:
    """Return the row counts of a model with only such layers."""
    rows = InvariantRowCounts(counts)
    return ShapeRowCounts(rows, {(layer.in_features, layer.out_features): rows})


class TestTiles:
    @pytest.mark.parametrize("counts", [(4, 16), (3,), (1, 2, 40)])
    def test_tiles_run_at_members_and_give_the_same(self, counts: tuple[int, ...]) -> None:
        classes = of(Fickle(lambda _: 0), counts)
        layer = Fickle(lambda _: 0)
        tiled = TiledLinear(layer, classes)
        for count in (1, 3, 4, 15, 16, 17, 64, 90):
            x = torch.randn(1, classes.batch.padded(count), 8)
            layer.seen.clear()
            assert torch.equal(tiled(x), x[..., :4])
            assert set(layer.seen) <= set(counts)
            assert layer.seen == tiled.tiles(x.shape[1])

    def test_real_layers_differ_by_rounding_at_most(self) -> None:
        layer = torch.nn.Linear(64, 32)
        x = torch.randn(1, 100, 64)
        with torch.inference_mode():
            torch.testing.assert_close(TiledLinear(layer, of(layer, (5,)))(x), layer(x))

    def test_tiling_a_model_and_back(self) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()))
        before = [id(module) for module in model.modules()]
        tile(model, of(torch.nn.Linear(4, 4), (4,)))
        tiled = [module for module in model.modules() if isinstance(module, TiledLinear)]
        assert len(tiled) == 2
        untile(model)
        assert [id(module) for module in model.modules()] == before


class Disturbed(ThreadedTextEngine):
    """An engine whose logits are perturbed by something they should not depend on."""

    vocabulary = BAD  # excludes the BAD token
    threads: tuple[int, ...] = (1,)

    def __init__(self, disturbance: Callable[[PackedBatch], NDArray[Any]]) -> None:
        super().__init__(10)
        self.disturbance = disturbance

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        moved: NDArray[np.float32] = super().forward(batch) + 1e-6 * self.disturbance(batch)[:, None].astype(np.float32)
        return moved


def decodes(batch: PackedBatch) -> int:
    """Return the number of texts in a pure decode batch of one row each, else 0."""
    return len(batch.tokens) if len(batch.wanted) == 1 and (np.delete(batch.slots, batch.wanted) == 0).all() else 0


DISTURBANCES: dict[str, Callable[[PackedBatch], NDArray[Any]]] = {
    "number of rows": lambda b: np.full(len(b.wanted), len(b.tokens)),
    "a neighbour's token": lambda b: np.full(len(b.wanted), b.tokens[0]),
    "place in the batch": lambda b: b.wanted,
    "place in memory": lambda b: b.slots[b.wanted],
    "wanted rows": lambda b: np.full(len(b.wanted), len(b.wanted)),
    "a graph of many texts with one row each": lambda b: np.full(len(b.wanted), decodes(b) > 2),
}


class TestCheck:
    def test_independent_rows_pass(self) -> None:
        engine = Disturbed(lambda b: np.zeros(len(b.wanted)))
        assert rows_are_independent(engine)
        assert engine.faults == []

    def test_they_may_depend_on_their_own_text(self) -> None:
        assert rows_are_independent(Disturbed(lambda b: b.tokens[b.wanted] + b.positions[b.wanted]))

    @pytest.mark.parametrize("what", DISTURBANCES)
    def test_what_they_must_not_depend_on_is_found(self, what: str) -> None:
        assert not rows_are_independent(Disturbed(DISTURBANCES[what]))

    @pytest.mark.parametrize("threads", [(2, 1), (1, 2), (2, 2)])
    def test_nor_on_the_number_of_threads(self, threads: tuple[int, ...]) -> None:
        engine = Disturbed(lambda b: np.full(len(b.wanted), engine.used))
        engine.threads = threads
        assert rows_are_independent(engine) is (len(set(threads)) == 1)
        assert engine.used == threads[0]

    def test_an_engine_without_threads_is_checked_once(self) -> None:
        engines = TextEngine(10), ThreadedTextEngine(10)
        for engine in engines:
            engine.bad = engine.vocabulary
            assert rows_are_independent(engine)
        once, twice = (len(engine.steps) for engine in engines)
        assert twice == 2 * once


def test_an_engine_whose_rows_depend_on_the_batch_says_so(tmp_path: Path) -> None:
    engine = CpuEngine(ModelDirectory(odd_models.make("crowded", tmp_path)), capacity=256)
    assert not engine.exact
    assert engine.numerics.endswith("/fast")
    packer = engine.packer()
    packer.add_path(np.arange(1, 4), packer.add_rows([3, 4, 5], 0, [1, 2, 3]))
    assert len(packer.pack().tokens) == 3  # no needless padding


def test_exactness_is_for_who_asks(tmp_path: Path) -> None:
    engine = CpuEngine(ModelDirectory(make("llama", tmp_path)), capacity=256, exact=False)
    assert not engine.exact
    assert engine.numerics.endswith("/fast")


class Layers(torch.nn.Module):
    """The part of a model used by `make_exact`."""

    def __init__(self, **layers: torch.nn.Linear) -> None:
        super().__init__()
        self.device, self.config = torch.device("cpu"), PretrainedConfig()
        for name, layer in layers.items():
            self.add_module(name, layer)


class Replaced(TextEngine):
    """An engine with layers that it does not run."""

    vocabulary = BAD  # excludes the BAD token

    def __init__(self, **layers: torch.nn.Linear) -> None:
        super().__init__(10)
        self.model: Any = Layers(**layers)
        self.classes: ShapeRowCounts | None = None
        self.run: list[torch.nn.Module] = []  # layers at the last tiling

    def tile(self, classes: ShapeRowCounts | None) -> None:
        self.classes, self.run = classes, list(self.model.children())


class Unsteady(Replaced):
    """An engine whose logits depend on the number of rows, whatever its layers."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return super().forward(batch) + np.float32(1e-6) * len(batch.tokens)


class TestCounterparts:
    """A layer is replaced if its counterpart has the same bits at more row counts."""

    def test_of_a_layer_that_depends_on_the_number_of_rows(self) -> None:
        steady, fickle = Fickle(lambda rows: 0), Fickle(lambda rows: int(rows > 16), outputs=5)
        engine, other = Replaced(steady=steady, fickle=fickle), Fickle(lambda rows: 0, outputs=5)
        counterparts = {id(fickle): other}  # the steady layer must not be looked up
        assert make_exact(engine, instead=lambda layer: counterparts[id(layer)])
        assert engine.model.steady is steady
        assert engine.model.fickle is other
        assert engine.classes is not None
        assert engine.classes.products[8, 5].counts == CANDIDATES

    def test_that_is_no_better_is_not_taken(self) -> None:
        fickle = Fickle(lambda rows: int(rows > 16))
        engine = Replaced(fickle=fickle)
        assert make_exact(engine, instead=lambda _: Fickle(fickle.kind))
        assert engine.model.fickle is fickle
        assert engine.classes is not None
        assert own(engine.classes) == members(lambda rows: rows <= 16)

    def test_all_layers_of_a_shape_or_none(self) -> None:
        """Otherwise the two kinds would have to agree on row counts."""
        one, two = Fickle(lambda rows: int(rows > 16)), Fickle(lambda rows: int(rows > 16))
        engine = Replaced(one=one, two=two)
        assert make_exact(engine, instead=lambda layer: Fickle(lambda rows: 0) if layer is one else None)
        assert engine.model.one is one
        assert engine.model.two is two

    def test_that_cannot_be_run_is_not_taken(self) -> None:
        fickle, broken = Fickle(lambda rows: int(rows > 16)), Fickle(lambda rows: 1 // 0)
        engine = Replaced(fickle=fickle)
        assert make_exact(engine, instead=lambda _: broken)
        assert engine.model.fickle is fickle

    def test_none_is_left_where_rows_depend_on_their_batch_all_the_same(self) -> None:
        fickle = Fickle(lambda rows: int(rows > 16))
        engine = Unsteady(fickle=fickle)
        assert not make_exact(engine, instead=lambda _: Fickle(lambda rows: 0))
        assert engine.run == [fickle]
        assert engine.classes is None


class UnsteadyInLongTexts(Replaced):
    """An engine whose logits depend on the number of rows, but only where attention splits a text."""

    def forward(self, batch: PackedBatch) -> NDArray[np.float32]:
        return super().forward(batch) + np.float32(1e-6 * len(batch.tokens) * int(batch.positions.max() >= 256))


def test_long_texts_are_checked_if_attention_splits_them() -> None:
    engine = UnsteadyInLongTexts(layer=Fickle(lambda rows: 0))
    assert make_exact(engine)
    assert make_exact(engine, split_context=200)  # there are no longer texts
    assert not make_exact(engine, split_context=1 << 17)
    assert engine.classes is None
    assert make_exact(Replaced(layer=Fickle(lambda rows: 0)), split_context=1 << 17)
