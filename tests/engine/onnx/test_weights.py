"""Exports with quantised weights: their sizes, their agreement with the model, and the choice of bits."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from safetensors.numpy import load_file

from specdec.engine import start_phases
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.onnx import export as exporting
from specdec.engine.onnx.agreement import Agreement, agreement, logits_of_model, sample_tokens
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import export
from specdec.engine.onnx.first_use import exported
from specdec.engine.onnx.weights import Bits
from specdec.local.models import DEMO
from tests.captured_logs import captured_logs
from tests.models import make

DRAFT = ModelDirectory(DEMO / "draft")


def operators(folder: Path) -> set[str]:
    graph = onnx.load(str(folder / "model.onnx"), load_external_data=False).graph
    return {node.op_type for node in graph.node}


def described(folder: Path) -> int:
    bits: int = json.loads((folder / "specdec.json").read_text())["bits"]
    return bits


@pytest.mark.parametrize(("bits", "overlap"), [(8, 0.98), pytest.param(4, 0.85, marks=pytest.mark.verify)])
def test_quantised_weights_agree_with_the_model(tmp_path: Path, bits: Bits, overlap: float) -> None:
    said: dict[str, tuple[int, int]] = {}
    found = export(DRAFT, tmp_path / "small", "float32", bits, lambda what, *bytes_: said.update({what: bytes_}))
    assert found is not None
    assert said.keys() == {"quantising", "writing"}
    assert all(0 < done <= total for done, total in said.values())
    assert found.overlap > overlap
    assert found.divergence > 0
    assert {"MatMulNBits", "GatherBlockQuantized"} <= operators(tmp_path / "small")
    assert described(tmp_path / "small") == bits
    tensors = load_file(DRAFT.path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"].size
    products = table + sum(tensor.size for name, tensor in tensors.items() if name.endswith("_proj.weight"))
    of_a_block = (4 + 1) / 32  # scale and zero point
    expected = products * (bits / 8 + of_a_block) + table * (1 + of_a_block)
    stored = (tmp_path / "small" / "model.onnx.data").stat().st_size
    assert 0.97 * expected < stored < 1.03 * expected


@pytest.mark.parametrize(
    "architecture", ["gpt2", *(pytest.param(name, marks=pytest.mark.verify) for name in ("opt", "qwen2", "gemma3"))]
)
def test_any_architecture_can_be_quantised(tmp_path: Path, architecture: str) -> None:
    directory = ModelDirectory(make(architecture, tmp_path / "model"))
    found = export(directory, tmp_path / "small", "float32", 8)
    assert found is not None
    assert found.overlap > 0.9
    assert "MatMulNBits" in operators(tmp_path / "small")
    assert not products_with_weights(tmp_path / "small")


def products_with_weights(folder: Path) -> list[str]:
    """Return the products that still multiply a weight."""
    graph = onnx.load(str(folder / "model.onnx"), load_external_data=False).graph
    weights = {tensor.name for tensor in graph.initializer if len(tensor.dims) == 2}
    return [node.name for node in graph.node if node.op_type in ("MatMul", "Gemm") and weights & set(node.input)]


@pytest.mark.verify
def test_an_unquantised_export_is_the_model(tmp_path: Path) -> None:
    assert export(DRAFT, tmp_path / "whole", "float32", 32) is None
    assert "MatMulNBits" not in operators(tmp_path / "whole")
    found = measured(tmp_path / "whole")
    assert found.overlap > 0.9999
    assert found.greedy == 1


def measured(folder: Path) -> Agreement:
    from specdec.engine.hf.pretrained import DTYPES, load

    tokens = sample_tokens(DRAFT)
    engine = OnnxEngine(ModelDirectory(folder), capacity=512, threads=1)
    return agreement(engine, tokens, logits_of_model(load(DRAFT, DTYPES["float32"], "cpu"), tokens))


@pytest.mark.parametrize(
    ("least", "bits"),
    [(0.97, 8), pytest.param(0.5, 4, marks=pytest.mark.verify), pytest.param(1.1, 32, marks=pytest.mark.verify)],
)
def test_the_fewest_bits_that_agree_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, least: float, bits: int
) -> None:
    monkeypatch.setattr(exporting, "MIN_QUANTISED_BYTES", 0)
    monkeypatch.setattr(exporting, "MIN_OVERLAP", least)
    found = export(DRAFT, tmp_path / "out")
    assert described(tmp_path / "out") == bits
    assert (found is None) == (bits == 32)
    assert ("agreement" in json.loads((tmp_path / "out" / "specdec.json").read_text())) == (bits < 32)


@pytest.mark.verify
def test_half_precision_is_quantised_on_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "MIN_QUANTISED_BYTES", 0)
    assert export(DRAFT, tmp_path / "out", "float16") is None
    assert described(tmp_path / "out") == 32
    assert export(DRAFT, tmp_path / "out", "float16", 4) is None  # for GPUs: not measured on a CPU
    assert described(tmp_path / "out") == 4
    assert "MatMulNBits" in operators(tmp_path / "out")


@pytest.mark.verify
def test_a_truncated_export_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(start_phases.ON_STDOUT, "1")
    monkeypatch.setattr(start_phases, "PROGRESS_SECONDS", 0.0)
    monkeypatch.setattr(start_phases, "MIN_PROGRESS_BYTES", 0)
    first = exported(DRAFT, quantised=True)
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("starting ")]
    assert told[0] == "starting export"
    assert told[-1].startswith("starting writing, ")  # what `specdec up` shows
    assert described(first) == 32  # a small model is not quantised by default
    written = (first / "model.onnx").stat().st_mtime_ns
    assert exported(DRAFT, quantised=True) == first
    assert (first / "model.onnx").stat().st_mtime_ns == written
    data = first / "model.onnx.data"
    size = data.stat().st_size
    with data.open("r+b") as file:
        file.truncate(size // 2)
    with captured_logs() as logs:
        assert exported(DRAFT, quantised=True) == first
    assert data.stat().st_size == size
    (line,) = (line for line in logs if line["event"] == "export_is_broken")
    assert line["why"] == f"model.onnx.data has {size // 2} bytes, must have {size}"
