"""Exports with quantised weights: their sizes, their agreement with the model, and the choice of bits."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
from specdec.engine.preflight.memory_needed import graph_bytes
from specdec.engine.start_phases import Progress
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


@dataclass(frozen=True)
class Quantised:
    """An export with the fewest bits that agree enough."""

    folder: Path
    bits: int
    overlap: float  # that these bits have at least
    found: Agreement | None
    said: dict[str, tuple[int, int]]  # last progress, by phase


def exported_with(least: float, folder: Path, progress: Progress = lambda what, done, total: None) -> Agreement | None:
    """Export the draft with the fewest bits whose overlap is at least `least`, as if it were a large model."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exporting, "MIN_QUANTISED_BYTES", 0)
        patch.setattr(exporting, "MIN_OVERLAP", least)
        return export(DRAFT, folder, progress=progress)


@pytest.fixture(
    scope="module", params=[(0.97, 8, 0.98), pytest.param((0.5, 4, 0.85), marks=pytest.mark.verify)], ids=["8", "4"]
)
def quantised(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Quantised:
    least, bits, overlap = request.param
    folder, said = tmp_path_factory.mktemp("quantised") / "small", dict[str, tuple[int, int]]()
    found = exported_with(least, folder, lambda what, *bytes_: said.update({what: bytes_}))
    return Quantised(folder, bits, overlap, found, said)


def test_the_fewest_bits_that_agree_are_chosen(quantised: Quantised) -> None:
    assert described(quantised.folder) == quantised.bits
    assert quantised.found is not None
    assert "agreement" in json.loads((quantised.folder / "specdec.json").read_text())


@pytest.mark.verify
def test_weights_that_agree_with_no_bits_are_not_quantised(tmp_path: Path) -> None:
    assert exported_with(1.1, tmp_path / "out") is None
    assert described(tmp_path / "out") == 32
    assert "agreement" not in json.loads((tmp_path / "out" / "specdec.json").read_text())


def test_quantised_weights_agree_with_the_model(quantised: Quantised) -> None:
    assert quantised.said.keys() == {"quantising", "writing"}
    assert all(0 < done <= total for done, total in quantised.said.values())
    assert quantised.found is not None
    assert quantised.found.overlap > quantised.overlap
    assert quantised.found.divergence > 0
    assert {"MatMulNBits", "GatherBlockQuantized"} <= operators(quantised.folder)
    tensors = load_file(DRAFT.path / "model.safetensors")
    table = tensors["model.embed_tokens.weight"].size
    products = table + sum(tensor.size for name, tensor in tensors.items() if name.endswith("_proj.weight"))
    of_a_block = (4 + 1) / 32  # scale and zero point
    expected = products * (quantised.bits / 8 + of_a_block) + table * (1 + of_a_block)
    stored = (quantised.folder / "model.onnx.data").stat().st_size
    assert 0.97 * expected < stored < 1.03 * expected


@pytest.mark.verify
@pytest.mark.parametrize("architecture", ["gpt2", "opt", "qwen2", "gemma3"])
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


@pytest.mark.parametrize(
    ("architecture", "fields", "bits"),
    [
        ("llama", {"tie_word_embeddings": True}, 32),
        ("llama", {"hidden_size": 48, "tie_word_embeddings": True}, 4),
        pytest.param("llama", {"tie_word_embeddings": True}, 4, marks=pytest.mark.verify),
        pytest.param("llama", {"tie_word_embeddings": False}, 32, marks=pytest.mark.verify),
        pytest.param("gpt2", {"tie_word_embeddings": True}, 32, marks=pytest.mark.verify),
        pytest.param("gemma3", {"tie_word_embeddings": True}, 4, marks=pytest.mark.verify),
        pytest.param("llama", {"tie_word_embeddings": False}, 4, marks=pytest.mark.verify),
    ],
)
def test_the_bytes_of_an_export_are_known_before_it(
    tmp_path: Path, architecture: str, fields: dict[str, Any], bits: Bits
) -> None:
    """Also where the token embeddings are the output head, and where their rows are not whole blocks."""
    directory = ModelDirectory(make(architecture, tmp_path / "model", **{"vocab_size": 4096} | fields))
    export(directory, tmp_path / "out", "float32", bits)
    written = (tmp_path / "out" / "model.onnx.data").stat().st_size
    assert graph_bytes(directory, "float32", quantised=bits == 4) == pytest.approx(written, rel=0.05)


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.verify), False])
def test_the_head_of_an_export_in_half_precision_is_wide(tmp_path: Path, tied: bool) -> None:
    directory = ModelDirectory(make("llama", tmp_path / "model", vocab_size=4096, tie_word_embeddings=tied))
    export(directory, tmp_path / "out", "float16", 32)
    written = (tmp_path / "out" / "model.onnx.data").stat().st_size
    assert graph_bytes(directory, "float16", quantised=False) == pytest.approx(written, rel=0.05)


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
