"""Products run in the tiles measured as fastest, with the same result."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.engine.cpu.gemm_tiles import largest_tiles
from specdec.engine.engines import cpu_engine
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf.batch_invariance import TiledLinear
from specdec.engine.hf.linear import PackedLinear, can_pack
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.padded.backend import PaddedBackend
from tests.models import make

pytestmark = pytest.mark.skipif(not can_pack(torch.float32), reason="no packed products here")


class Choking(PackedLinear):
    """Slow beyond a maximum number of rows; adds the seconds of each product to the shared list `passed`."""

    def __init__(self, outputs: int, most: int, passed: list[float]) -> None:
        super().__init__(torch.nn.Linear(8, outputs))
        self.most = most
        self.passed = passed

    def forward(self, x: Tensor) -> Tensor:
        self.passed.append(len(x) * (2e-5 if len(x) <= self.most else 6e-5))
        return super().forward(x)


def test_each_shape_has_its_own() -> None:
    passed: list[float] = []
    layers = [Choking(outputs, most, passed) for outputs, most in ((4, 128), (16, 256), (4, 128), (32, 512))]
    assert largest_tiles(layers, lambda: sum(passed)) == {(8, 4): 128, (8, 16): 256, (8, 32): 512}


@pytest.mark.parametrize("exact", [True, False])
def test_an_engine_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    directory = ModelDirectory(make("llama", tmp_path))

    def engine(most: int) -> CpuEngine:
        monkeypatch.setattr(cpu_engine, "largest_tiles", lambda layers: dict.fromkeys(_shapes(layers), most))
        return CpuEngine(directory, capacity=512, exact=exact)

    def logits(engine: CpuEngine) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        packer = engine.packer()
        slots = np.arange(1, 301)
        packer.add_path(slots, packer.add_rows([3, 4, 5] * 100, 0, slots))
        packer.want(299)
        return engine.forward(packer.pack())[:1]

    whole, parted = engine(512), engine(64)
    tiled = [module for module in parted.model.model.modules() if isinstance(module, TiledLinear)]
    assert {max(module.tiles(384)) for module in tiled} == {64}
    assert whole.numerics == parted.numerics  # whichever is fastest, the bits are the same
    if exact:
        assert parted.exact
        np.testing.assert_array_equal(logits(parted), logits(whole))
    else:
        np.testing.assert_allclose(logits(parted), logits(whole), rtol=1e-4, atol=1e-4)


def test_batches_that_are_not_padded_are_not_tiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With padded batches, in fast numerics, any number of rows occurs."""
    monkeypatch.setattr(cpu_engine, "largest_tiles", lambda layers: dict.fromkeys(_shapes(layers), 64))
    engine = CpuEngine(ModelDirectory(make("llama", tmp_path)), capacity=512, exact=False, backend=PaddedBackend)
    packer = engine.packer()
    slots = np.arange(1, 131)
    packer.add_path(slots, packer.add_rows([3, 4] * 65, 0, slots))
    packer.want(129)
    assert np.isfinite(engine.forward(packer.pack())[:1]).all()


def _shapes(layers: list[PackedLinear]) -> set[tuple[int, int]]:
    return {(layer.in_features, layer.out_features) for layer in layers}
