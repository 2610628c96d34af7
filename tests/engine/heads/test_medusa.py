"""Medusa heads: what they compute, and the layouts of files they are read from."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.kinds import memory_of_heads
from specdec.engine.heads.medusa import MedusaHeads
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.row_counts import ShapeRowCounts
from specdec.engine.unsupported import UnsupportedModelError
from tests.heads import Tensors, make_heads, written
from tests.models import make

HEADS, LAYERS, HIDDEN, VOCABULARY = 3, 2, 8, 21
TARGET = TargetShape(HIDDEN, VOCABULARY, HIDDEN, 2)
OUTPUT = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(0))
"""The target's output head."""


def target_output(states: Tensor) -> Tensor:
    return states @ OUTPUT.T


class Weights:
    """Random weights of heads."""

    def __init__(self, layers: int = LAYERS) -> None:
        random = torch.Generator().manual_seed(1)
        self.blocks = torch.randn(HEADS, layers, HIDDEN, HIDDEN, generator=random) / 3
        self.biases = torch.randn(HEADS, layers, HIDDEN, generator=random)
        self.outputs = torch.randn(HEADS, VOCABULARY, HIDDEN, generator=random)

    def reference(self, hidden: Tensor, *, bias: bool = True, outputs: Tensor | None = None) -> Tensor:
        """Return the logits [n, H, V], by the formula, in float64."""
        rows = []
        for state in hidden.double():
            heads = []
            for head in range(HEADS):
                r = state
                for weight, offset in zip(self.blocks[head].double(), self.biases[head].double(), strict=True):
                    x = weight @ r + (offset if bias else 0.0)
                    r = r + x / (1 + torch.exp(-x))
                heads.append((self.outputs[head] if outputs is None else outputs).double() @ r)
            rows.append(torch.stack(heads))
        return torch.stack(rows)


def fasterdecoding(weights: Weights, prefix: str = "") -> Tensors:
    found = {}
    for head in range(HEADS):
        layers = weights.blocks.shape[1]
        for layer in range(layers):
            found[f"{prefix}{head}.{layer}.linear.weight"] = weights.blocks[head, layer].clone()
            found[f"{prefix}{head}.{layer}.linear.bias"] = weights.biases[head, layer].clone()
        found[f"{prefix}{head}.{layers}.weight"] = weights.outputs[head].clone()
    return found


def vllm(weights: Weights, prefix: str = "", *, bias: bool = False) -> Tensors:
    found = {}
    for head in range(HEADS):
        for layer in range(weights.blocks.shape[1]):
            found[f"{prefix}blocks.{head}.layers.{layer}.weight"] = weights.blocks[head, layer].clone()
            if bias:
                found[f"{prefix}blocks.{head}.layers.{layer}.bias"] = weights.biases[head, layer].clone()
        found[f"{prefix}lm_heads.{head}.weight"] = weights.outputs[head].clone()
    return found


def loaded(path: Path) -> MedusaHeads:
    return MedusaFiles.of(path, TARGET).load(target_output, "cpu", torch.float32)


@pytest.fixture
def hidden() -> Tensor:
    return torch.randn(4, HIDDEN, generator=torch.Generator().manual_seed(2))


def compare(heads: MedusaHeads, hidden: Tensor, want: Tensor) -> None:
    found = heads(hidden)
    assert found.shape == (len(hidden), HEADS, VOCABULARY)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), want, atol=1e-4, rtol=1e-4)
    for number in range(HEADS):
        torch.testing.assert_close(heads.head(number, hidden), found[:, number], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "medusa_lm_head.pt"])
def test_heads_of_fasterdecoding(tmp_path: Path, hidden: Tensor, name: str, layers: int) -> None:
    """Published configurations may count too few heads: the tensors decide."""
    weights = Weights(layers)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "lmsys/vicuna-7b-v1.3"}
    heads = loaded(written(tmp_path / "heads", fasterdecoding(weights), config, name=name))
    compare(heads, hidden, weights.reference(hidden))
    assert (heads.shape.heads, heads.shape.layers, heads.shape.outputs) == (HEADS, layers, HEADS)


def test_heads_beside_a_whole_model_of_medusa_2(tmp_path: Path, hidden: Tensor) -> None:
    weights = Weights()
    others = {"model.layers.0.mlp.gate_proj.weight": torch.zeros(3, 3), "lm_head.weight": torch.zeros(VOCABULARY, 5)}
    folder = written(tmp_path / "heads", others, {"model_type": "llama"}, name="model-00001-of-00002.safetensors")
    written(folder, fasterdecoding(weights, "medusa_head."), name="model-00002-of-00002.safetensors")
    compare(loaded(folder), hidden, weights.reference(hidden))


@pytest.mark.parametrize("prefix", ["", "medusa_heads."])
@pytest.mark.parametrize("bias", [False, True])
def test_heads_of_vllm(tmp_path: Path, hidden: Tensor, prefix: str, bias: bool) -> None:
    weights = Weights()
    config = {"model_type": "medusa", "logit_scale": 0.5}
    heads = loaded(written(tmp_path / "heads", vllm(weights, prefix, bias=bias), config))
    compare(heads, hidden, 0.5 * weights.reference(hidden, bias=bias))


def test_one_output_head_for_all(tmp_path: Path, hidden: Tensor) -> None:
    weights = Weights()
    tensors = {name: tensor for name, tensor in vllm(weights).items() if not name.startswith("lm_heads")}
    own = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(3))
    heads = loaded(written(tmp_path / "own", tensors | {"lm_head.weight": own}))
    compare(heads, hidden, weights.reference(hidden, bias=False, outputs=own))
    assert heads.shape.outputs == 1
    heads = loaded(written(tmp_path / "targets", tensors))
    compare(heads, hidden, weights.reference(hidden, bias=False, outputs=OUTPUT))
    assert heads.shape.outputs == 0


def test_a_part_of_the_vocabulary(tmp_path: Path, hidden: Tensor) -> None:
    weights, known = Weights(), torch.tensor([2, 3, 5, 7])
    tensors = vllm(weights) | {"token_map": known}
    for head in range(HEADS):
        tensors[f"lm_heads.{head}.weight"] = weights.outputs[head, known].clone()
    found = loaded(written(tmp_path / "heads", tensors))(hidden)
    want = weights.reference(hidden, bias=False)
    torch.testing.assert_close(found[..., known].double(), want[..., known], atol=1e-4, rtol=1e-4)
    unknown = [token for token in range(VOCABULARY) if token not in known.tolist()]
    assert bool((found[..., unknown] == -torch.inf).all())


def without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        del tensors[name]

    return change


def with_tensor(name: str, *shape: int) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        tensors[name] = torch.zeros(*shape)

    return change


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("blocks.1.layers.1.weight"), "head 1 lacks its weight of block 1"),
        (without("lm_heads.2.weight"), "head 2 lacks its output head"),
        (with_tensor("blocks.0.layers.0.bias", HIDDEN), "head 0 lacks its bias of block 1"),
        (
            with_tensor("lm_heads.0.weight", VOCABULARY + 1, HIDDEN),
            r"lm_heads.0.weight has the shape \[22, 8\], must have \[21, 8\] for a target of hidden size 8 with 21",
        ),
        (with_tensor("blocks.0.layers.0.weight", 4, 4), r"has the shape \[4, 4\], must have \[8, 8\]"),
        (
            with_tensor("lm_heads.9.weight", VOCABULARY, HIDDEN),
            "lm_heads.9.weight is unexpected in 3 heads of 2 blocks",
        ),
        (with_tensor("lm_heads.0.bias", VOCABULARY), "lm_heads.0.bias is no part of Medusa heads"),
        (with_tensor("medusa_heads.lm_heads.0.weight", 1), "are the same part"),
        (with_tensor("blocks.40.layers.0.weight", 8, 8), "head 3 lacks its weight of block 0"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: Callable[[Tensors], None], why: str) -> None:
    tensors = vllm(Weights())
    change(tensors)
    with pytest.raises(HeadsFilesError, match=why):
        MedusaFiles.of(written(tmp_path / "heads", tensors), TARGET)


def test_directories_without_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsFilesError, match="no such file or directory"):
        MedusaFiles.of(tmp_path / "absent", TARGET)
    (tmp_path / "empty").mkdir()
    with pytest.raises(HeadsFilesError, match=r"neither medusa_lm_head.safetensors, .*, \*.safetensors nor pytorch_"):
        MedusaFiles.of(tmp_path / "empty", TARGET)
    with pytest.raises(HeadsFilesError, match="has no heads: no tensors such as"):
        MedusaFiles.of(written(tmp_path / "model", {"model.norm.weight": torch.zeros(3)}), TARGET)


class Harmful:
    """A pickle that calls a function when it is read."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.file),)


def test_a_pickle_calls_nothing(tmp_path: Path) -> None:
    harmful: Any = {"0.0.linear.weight": Harmful(tmp_path / "made")}
    folder = written(tmp_path / "heads", harmful, name="medusa_lm_head.pt")
    with pytest.raises(HeadsFilesError, match="cannot be loaded"):
        MedusaFiles.of(folder, TARGET)
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("ids", [[2, 3, 5, VOCABULARY], [-1, 3, 5, 7]])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, ids: list[int]) -> None:
    tensors = vllm(Weights()) | {"token_map": torch.tensor(ids)}
    tensors |= {f"lm_heads.{head}.weight": torch.zeros(4, HIDDEN) for head in range(HEADS)}
    with pytest.raises(HeadsFilesError, match="token_map has ids from"):
        loaded(written(tmp_path / "heads", tensors))


def test_a_start_without_room_for_heads_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make("llama", tmp_path / "target")
    heads = make_heads(tmp_path / "heads")
    wanted = Wanted(target, Placement(kv_tokens=512))
    check(wanted, beside=partial(memory_of_heads, heads))
    monkeypatch.setattr("specdec.engine.preflight.check.free_bytes", lambda _: 600_000_000)
    bytes_of_weights = 4 * 3 * (64 * 64 + 320 * 64)
    said = rf"heads heads needs {bytes_of_weights / 1e9:.3g} GB for weights in float32, 0.0336 GB for checks and steps;"
    with pytest.raises(UnsupportedModelError, match=said):
        check(wanted, beside=partial(memory_of_heads, heads))
    with pytest.raises(HeadsFilesError, match="for a target of hidden size 64 with 320 token ids"):
        check(wanted, beside=partial(memory_of_heads, make_heads(tmp_path / "others", hidden=32)))


@pytest.mark.parametrize("exact", [False, True])
def test_the_targets_output_head_takes_any_number_of_states(tmp_path: Path, exact: bool) -> None:
    """Its products run only at some numbers of rows."""
    engine = CpuEngine(ModelDirectory(make("llama", tmp_path / "target")), capacity=512, exact=exact)
    if exact:
        engine.tile(ShapeRowCounts.alike((4, 8, 16), [(64, 320)]))
    states = torch.randn(600, engine.hidden_size, generator=torch.Generator().manual_seed(4))
    whole = engine.output_head(states)
    assert whole.shape == (600, 320)
    for count in (1, 17, 35):
        torch.testing.assert_close(engine.output_head(states[:count]), whole[:count], atol=1e-5, rtol=1e-5)
