"""Weights quantised at start: exact rows, logits near those of the stored weights, less memory, other numerics."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from specdec.engine.engine import Engine
from specdec.engine.engines import cpu_engine
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf.block_linear import BlockLinear
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import BYTES, Dtype, Placement, Weights
from specdec.engine.preflight.device import check_placement
from specdec.engine.preflight.memory_needed import memory_needed
from specdec.engine.preflight.weights import bytes_of
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local.models import DEMO
from tests.models import make, save

TARGET = ModelDirectory(DEMO / "target")
ROOT = Path(__file__).parent.parent.parent
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
    reason = f"{products} products with 3 threads each need {2 * products} more threads, pids.max permits .* --threads"
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


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma3"])
def test_weights_are_converted_one_at_a_time_to_the_same_numbers(
    tmp_path: Path, architecture: str, stored: torch.dtype
) -> None:
    """Gemma has a constant in a buffer, which narrower dtypes would round."""
    narrow = AutoModelForCausalLM.from_pretrained(make(architecture, tmp_path / "wide"), dtype=stored)
    found = []
    for name, dtype in (("narrow", stored), ("wide", torch.float32)):
        directory = ModelDirectory(save(narrow.to(dtype), tmp_path / name))
        engine = CpuEngine(directory, capacity=512, threads=(1,), exact=False, bits=8)
        assert {parameter.dtype for parameter in engine.model.parameters()} == {torch.float32}
        found.append(logits(engine, len(TEXT)))
    np.testing.assert_array_equal(found[0], found[1])


LOADING = """
import sys
from pathlib import Path
import torch
from specdec.engine.hf.pretrained import load
from specdec.engine.model_directory import ModelDirectory
from tests.engine.test_block_weights import anonymous
before = anonymous()
model = load(ModelDirectory(Path(sys.argv[1])), torch.float32, "cpu", torch.float16)
assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}
print(anonymous() - before)
"""


def anonymous() -> int:
    """Return the bytes of this process's memory that are not pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_loading_float16_copies_nothing(tmp_path: Path) -> None:
    """67 MB in the file: float32 copies of all weights would take twice that before the first is quantised."""
    fields = {"hidden_size": 1024, "intermediate_size": 4096}
    model = AutoModelForCausalLM.from_pretrained(make("llama", tmp_path / "wide", **fields), dtype=torch.float16)
    directory = ModelDirectory(save(model, tmp_path / "narrow"))
    assert bytes_of(directory, None) > 60_000_000
    command = [sys.executable, "-c", LOADING, str(directory.path)]
    run = subprocess.run(command, capture_output=True, check=True, text=True, cwd=ROOT)
    assert int(run.stdout) < 20_000_000


@pytest.mark.parametrize(
    ("stored", "dtype", "copied"),
    [
        (torch.float16, "float32", False),
        (torch.bfloat16, "float32", False),
        (torch.float32, "float32", False),
        (torch.float16, "bfloat16", True),
        (torch.float32, "bfloat16", True),
        (torch.bfloat16, "bfloat16", False),
    ],
)
def test_copies_made_while_loading_are_counted(tmp_path: Path, stored: torch.dtype, dtype: Dtype, copied: bool) -> None:
    fields = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8}
    model = AutoModelForCausalLM.from_pretrained(make("llama", tmp_path / "wide", **fields), dtype=stored)
    directory = ModelDirectory(save(model, tmp_path / "model"))
    needed = memory_needed(directory, Placement("torch", dtype=dtype, weights="int4"))
    whole = bytes_of(directory, BYTES[dtype])
    assert (needed.weights + needed.working > whole) == copied


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


def test_a_mixture_of_experts_is_refused(tmp_path: Path) -> None:
    """It would keep nearly all of its memory."""
    shutil.copytree(TARGET.path, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    weights = {"model.layers.0.mlp.experts.0.up_proj.weight": np.zeros((32, 32), dtype=np.float32)}
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match="--weights int4: does not quantise the experts of"):
        check_placement(ModelDirectory(tmp_path), Placement("torch", weights="int4"))


@pytest.mark.parametrize(("weights", "share"), [("int8", 0.85), ("int4", 0.65)])
def test_less_memory_is_needed(weights: Weights, share: float) -> None:
    whole = memory_needed(TARGET, Placement("torch", dtype="bfloat16")).weights
    assert memory_needed(TARGET, Placement("torch", dtype="bfloat16", weights=weights)).weights < share * whole
