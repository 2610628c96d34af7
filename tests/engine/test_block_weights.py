"""Weights quantised at start: exact rows, logits near those of the stored weights, less memory, other numerics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.engine.engine import Engine
from specdec.engine.engines import cpu_engine
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf.block_linear import BlockLinear
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement, Weights
from specdec.engine.preflight.device import check_placement
from specdec.engine.preflight.memory_needed import memory_needed
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local.models import DEMO
from tests.models import make

TARGET = ModelDirectory(DEMO / "target")
TEXT = list(range(5, 45))


def logits(engine: Engine, rows: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Return the logits of the text, computed `rows` rows at a time."""
    found = []
    for start in range(0, len(TEXT), rows):
        packer = engine.packer()
        part = TEXT[start : start + rows]
        slots = np.arange(1, start + len(part) + 1)
        own = packer.add_rows(part, start, slots[start:])
        packer.add_path(slots, list(own))
        for row in own:
            packer.want(row)
        found.append(engine.forward(packer.pack()))
    return np.concatenate(found)


@pytest.fixture(scope="module")
def own() -> torch.Tensor:
    """Probabilities after each token of the text, by the model's own forward pass with the stored weights."""
    model: Any = AutoModelForCausalLM.from_pretrained(TARGET.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        return torch.softmax(model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0], dim=1)


@pytest.mark.parametrize(("bits", "overlap"), [(8, 0.97), pytest.param(4, 0.8, marks=pytest.mark.verify)])
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.verify)])
def test_rows_are_exact_and_logits_near(own: torch.Tensor, bits: int, overlap: float, dtype: str) -> None:
    engine = CpuEngine(TARGET, capacity=512, dtype=dtype, threads=(1,), exact=True, bits=bits)
    assert engine.exact
    assert f"/int{bits}-onnxruntime-" in engine.numerics
    assert any(isinstance(module, BlockLinear) for module in engine.model.modules())
    found = logits(engine, len(TEXT))
    for rows in (1, 3, 8):
        np.testing.assert_array_equal(logits(engine, rows), found)
    ours = torch.softmax(torch.from_numpy(found), dim=1)
    assert torch.minimum(ours, own).sum(dim=1).mean() > overlap


@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(name, marks=pytest.mark.verify) for name in ("opt", "qwen2", "gemma3"))]
)
def test_every_linear_layer_is_in_blocks(tmp_path: Path, architecture: str) -> None:
    directory = ModelDirectory(make(architecture, tmp_path / "model"))
    engine = CpuEngine(directory, capacity=512, threads=(1,), exact=True, bits=8)
    assert engine.exact
    left = [name for name, module in engine.model.named_modules() if type(module) is torch.nn.Linear]
    assert left == []
    assert any(isinstance(module, BlockLinear) for module in engine.model.modules())


@pytest.mark.parametrize("architecture", ["llama", "gpt2"])  # one whose products are joined, and another
def test_more_threads_than_permitted_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    """Each product has its own pool of threads."""
    directory = ModelDirectory(make(architecture, tmp_path / "model"))
    engine = CpuEngine(directory, capacity=512, threads=(1,), exact=False, bits=8)
    products = sum(isinstance(module, BlockLinear) for module in engine.model.modules())
    monkeypatch.setattr(cpu_engine, "threads_left", lambda: 2 * products - 1)
    reason = f"{products} products with 3 threads each start {2 * products} threads, and pids.max permits .* --threads"
    with pytest.raises(UnsupportedModelError, match=reason):
        CpuEngine(directory, capacity=512, threads=(3,), exact=False, bits=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_is_the_product_with_its_quantised_weight(dtype: torch.dtype, bias: bool) -> None:
    """With weights and inputs on a grid that 8 bits hold, the product is exact except for the result's rounding."""
    generator = torch.Generator().manual_seed(1)
    linear = torch.nn.Linear(64, 48, bias=bias).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(torch.randint(-127, 128, (48, 64), generator=generator))
        linear.weight[:, ::32] = 127.0  # each block reaches both ends of the grid
        linear.weight[:, 1::32] = -128.0
    x = torch.randint(-127, 128, (3, 5, 64), generator=generator).to(dtype)
    x[..., ::32] = 127.0
    found, expected = BlockLinear(linear, 8, 1)(x), linear(x).detach()
    assert found.shape == (3, 5, 48)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


def test_a_pass_may_want_no_row() -> None:
    """Like the first passes over a long prompt."""
    engine = CpuEngine(TARGET, capacity=64, threads=(1,), exact=False, bits=8)
    packer, slots = engine.packer(), np.arange(1, 41)
    packer.add_path(slots, list(packer.add_rows(TEXT, 0, slots)))
    assert engine.forward(packer.pack()).shape == (0, TARGET.vocabulary)


@pytest.mark.parametrize(
    ("placement", "said"),
    [
        (Placement("onnx", weights="int8"), "--weights int8: is for --engine torch on a CPU, not for onnx on cpu"),
        (Placement("eager", weights="int4"), "--weights int4: is for --engine torch on a CPU, not for eager on cpu"),
    ],
)
def test_other_engines_are_refused(placement: Placement, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        check_placement(TARGET, placement)


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.85), ("int4", 0.65)])
def test_less_memory_is_needed(weights: Weights, share: float) -> None:
    whole = memory_needed(TARGET, Placement("torch", dtype="bfloat16")).weights
    assert memory_needed(TARGET, Placement("torch", dtype="bfloat16", weights=weights)).weights < share * whole
