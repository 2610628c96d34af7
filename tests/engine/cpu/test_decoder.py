"""The fused decoder: its loops against torch, and the models that run on it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.engine.cpu import decoder, packed_gemm
from specdec.engine.cpu.arithmetic import array_of, exp, narrowed
from specdec.engine.cpu.decoder import FIRST_POSITIONS
from specdec.engine.cpu.layers import compiled
from specdec.engine.cpu.loops import add_and_normalise, gate, rotate
from specdec.engine.cpu.openmp import Cuts, evenly
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf import llama_like
from specdec.engine.hf.linear import Joined, JoinedPart, can_pack, join
from specdec.engine.hf.llama_like import join_products
from specdec.engine.hf.pretrained import DTYPES as BY_NAME
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import make

DTYPES = [torch.float32, torch.bfloat16]
ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2**-8}
"""Relative rounding error of the type."""

EPSILON = np.float32(1e-6)


def shares(rows: int) -> Cuts:
    """Return two shares."""
    return evenly(rows, 2, least=1)


def random(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "mistral"])
def test_models_of_the_kind_run_on_it(tmp_path: Path, name: str) -> None:
    """The engine's tests compare its output with the model's own forward pass."""
    engine = CpuEngine(ModelDirectory(make(name, tmp_path / name)), capacity=1024)
    assert "/joined/" in engine.numerics
    assert any(isinstance(module, JoinedPart) for module in engine.model.modules())


@pytest.mark.parametrize("name", ["gpt2", "opt", "gemma2"])
def test_others_do_not(tmp_path: Path, name: str) -> None:
    assert "/layers/" in CpuEngine(ModelDirectory(make(name, tmp_path / name)), capacity=1024).numerics


@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_bias": True, "mlp_bias": True},
        {"tie_word_embeddings": True},
        {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
        {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3, "rope_theta": 10000.0}},
        {"num_key_value_heads": 1, "head_dim": 24},
    ],
    ids=str,
)
def test_variants_are_computed_as_transformers_does(tmp_path: Path, overrides: dict[str, Any]) -> None:
    directory = ModelDirectory(make("llama", tmp_path / "m", **overrides))
    engine = CpuEngine(directory, capacity=1024)
    text = list(range(1, 41))
    packer = engine.packer()
    rows = packer.add_rows(text, 0, np.arange(1, 41))
    packer.add_path(np.arange(1, 41), list(rows))
    packer.want(rows[-1])
    got = engine.forward(packer.pack())[0]
    untouched = AutoModelForCausalLM.from_pretrained(directory.path, dtype=torch.float32).eval()
    with torch.inference_mode():
        want = untouched(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.verify)])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_compiled_or_interpreted_the_bits_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: str
) -> None:
    """For a prompt, for single rows after it, and with every number of threads."""
    directory = ModelDirectory(make(name, tmp_path / name))
    text = np.random.default_rng(0).integers(1, directory.vocabulary, 60).tolist()

    def logits(engine: CpuEngine) -> NDArray[np.float32]:
        found = []
        for threads in (2, 1):
            engine.use_threads(threads)
            for begin, end in ((0, 40), (40, 41), (41, 60)):
                packer = engine.packer()
                rows = packer.add_rows(text[begin:end], begin, np.arange(1 + begin, 1 + end))
                packer.add_path(np.arange(1, 1 + end), list(rows))
                for row in rows:
                    packer.want(row)
                found.append(engine.forward(packer.pack())[: end - begin].copy())
        return np.concatenate(found)

    if not packed_gemm.AVAILABLE or not can_pack(BY_NAME[dtype]):
        pytest.skip("no packed products here")
    asked = []

    def noted(width: int) -> Any:
        asked.append(width)
        return compiled(width)

    monkeypatch.setattr(decoder, "compiled", noted)
    found = logits(CpuEngine(directory, capacity=256, dtype=dtype, threads=(2, 1)))
    assert asked
    asked.clear()
    monkeypatch.setattr(packed_gemm, "AVAILABLE", False)
    np.testing.assert_array_equal(found, logits(CpuEngine(directory, capacity=256, dtype=dtype, threads=(2, 1))))
    assert not asked


def test_a_layer_that_computes_otherwise_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check at start compares with the model as loaded."""
    directory = ModelDirectory(make("qwen2", tmp_path / "m"))

    def spoil(model: PreTrainedModel) -> None:
        join_products(model)
        with torch.no_grad():
            model.model.layers[0].self_attn.q_proj.joined.linear.weight[:3] = 0

    monkeypatch.setattr(llama_like, "join_products", spoil)
    with pytest.raises(UnsupportedModelError, match="differ from the model's own"):
        CpuEngine(directory, capacity=1024)


def test_positions_beyond_those_first_computed(tmp_path: Path) -> None:
    """Their bits are the same wherever the previous table of angles ended."""
    directory = ModelDirectory(make("llama", tmp_path / "m", max_position_embeddings=4096))
    last = 2 * FIRST_POSITIONS + 100

    def logits(*firsts: int) -> NDArray[np.float32]:
        engine = CpuEngine(
            directory, capacity=8192, exact=False
        )  # without the check, which would write to slots read here
        for start, position in [*((4000, first) for first in firsts), (1, last)]:
            packer = engine.packer()
            rows = packer.add_rows([5], position, [start + position])
            packer.add_path(np.arange(start, start + position + 1), list(rows))
            packer.want(rows[0])
            found = engine.forward(packer.pack())
        return found

    np.testing.assert_array_equal(logits(), logits(FIRST_POSITIONS + 500))


def test_parts_are_what_they_were() -> None:
    module = torch.nn.Module()
    module.a, module.b = torch.nn.Linear(8, 3), torch.nn.Linear(8, 5)
    x = random(4, 8)
    before = module.a(x), module.b(x)
    join(module, ("a", "b"))
    assert isinstance(module.a.joined, Joined)
    assert module.a.joined is module.b.joined
    for got, want in zip((module.a(x), module.b(x)), before, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
class TestLoops:
    def test_add_and_normalise(self, dtype: torch.dtype) -> None:
        residual, update, weight = (random(5, 48, seed=i).to(dtype) for i in range(3))
        weight = weight[0].clone()
        out = torch.empty_like(residual)
        added = residual + update
        add_and_normalise(array_of(residual), array_of(update), array_of(weight), EPSILON, array_of(out), shares(5))
        assert torch.equal(residual, added)
        want = torch.nn.functional.rms_norm(added.float(), (48,), weight.float(), float(EPSILON))
        torch.testing.assert_close(out.float(), want, rtol=ROUNDING[dtype], atol=1e-6)

    def test_gate(self, dtype: torch.dtype) -> None:
        projected = (8 * random(3, 2 * 40)).to(dtype)
        projected[0, :4] = torch.tensor([0.0, -200.0, 200.0, -1e-3])
        out = torch.empty(3, 40, dtype=dtype)
        gate(array_of(projected), array_of(out), shares(3))
        gates, ups = projected.float().chunk(2, dim=1)
        torch.testing.assert_close(out.float(), torch.nn.functional.silu(gates) * ups, rtol=ROUNDING[dtype], atol=1e-6)

    @pytest.mark.parametrize("normalised", [False, True])
    def test_rotate(self, dtype: torch.dtype, normalised: bool) -> None:
        heads, kv_heads, width, rows = 4, 2, 16, 3
        projected = random(rows, (heads + 2 * kv_heads) * width).to(dtype)
        norms = random(2, width, seed=1).to(dtype) if normalised else torch.empty(0, width, dtype=dtype)
        angles = random(50, width // 2, seed=2)
        positions, slots = np.array([7, 0, 49]), np.array([3, 9, 4])
        query = np.empty((rows, heads, width), np.float32)
        keys, values = (torch.zeros(kv_heads, 10, width, dtype=dtype) for _ in range(2))
        rotate(
            array_of(projected), array_of(norms), EPSILON, angles.cos().numpy(), angles.sin().numpy(),
            positions, slots, query, array_of(keys), array_of(values), np.empty((3, width), np.float32), shares(rows),
        )  # fmt: skip

        split = projected.view(rows, -1, width)
        q, k, v = (part.float() for part in torch.split(split, [heads, kv_heads, kv_heads], dim=1))
        if normalised:
            q = torch.nn.functional.rms_norm(q, (width,), norms[0].float(), float(EPSILON))
            k = torch.nn.functional.rms_norm(k, (width,), norms[1].float(), float(EPSILON))
        angle = angles[positions].repeat(1, 2)[:, None]

        def turned(x: torch.Tensor) -> torch.Tensor:
            low, high = x.chunk(2, dim=-1)
            return x * angle.cos() + torch.cat([-high, low], dim=-1) * angle.sin()

        torch.testing.assert_close(torch.from_numpy(query), turned(q), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(keys[:, slots].transpose(0, 1).float(), turned(k), rtol=ROUNDING[dtype], atol=1e-5)
        assert torch.equal(values[:, slots].transpose(0, 1).float(), v)
        untouched = np.setdiff1d(np.arange(10), slots)
        assert not keys[:, untouched].any()
        assert not values[:, untouched].any()

    @pytest.mark.parametrize("broken", [math.nan, math.inf])
    @pytest.mark.parametrize("column", [5, 50], ids=["gate", "up"])
    def test_what_is_no_number_stays_none(self, dtype: torch.dtype, broken: float, column: int) -> None:
        """And the other rows are unaffected."""
        residual, out = random(3, 48).to(dtype), torch.empty(3, 48, dtype=dtype)
        residual[1, 5] = broken
        update = torch.zeros_like(residual)
        ones = torch.ones(48, dtype=dtype)
        add_and_normalise(array_of(residual), array_of(update), array_of(ones), EPSILON, array_of(out), shares(3))
        assert not out[1].isfinite().all()
        assert out[[0, 2]].isfinite().all()
        projected = random(3, 80).to(dtype)
        projected[1, column] = broken
        gated = torch.empty(3, 40, dtype=dtype)
        gate(array_of(projected), array_of(gated), shares(3))
        assert not gated[1].isfinite().all()
        assert gated[[0, 2]].isfinite().all()


@numba.njit  # type: ignore[untyped-decorator]
def _store(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = narrowed(numbers[i], out[i])


@numba.njit  # type: ignore[untyped-decorator]
def _exponentials(numbers: Any, out: Any) -> None:
    for i in range(len(numbers)):
        out[i] = exp(numbers[i])


def test_exponentials() -> None:
    numbers = np.linspace(-87, 0, 1 << 16, dtype=np.float32)
    out = np.empty_like(numbers)
    _exponentials(numbers, out)
    np.testing.assert_allclose(out, np.exp(numbers.astype(np.float64)), rtol=5 * 2**-23)


def test_rounding_is_torchs() -> None:
    """To the nearest bfloat16, ties to even; NaNs stay NaNs, whatever their bits."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << 16) | 0x8000
    numbers: NDArray[np.float32] = np.concatenate([bits, ties]).view(np.float32)
    want = torch.from_numpy(numbers).to(torch.bfloat16)
    got = torch.empty_like(want)
    _store(numbers, array_of(got))
    same = (array_of(got) == array_of(want)) | (got.isnan() & want.isnan()).numpy()
    assert same.all()
