"""The dtype in which a model computes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Dtype, Kind, Placement, WantedDtype
from specdec.engine.preflight.dtype import dtype_of
from tests.models import make

Configured = Callable[..., ModelDirectory]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models"))


@pytest.fixture
def configured(llama: Path) -> Configured:
    """Return a function that writes given fields to config.json (None removes one) and returns the model directory."""

    def configure(**fields: str | None) -> ModelDirectory:
        config = json.loads((llama / "config.json").read_text()) | fields
        (llama / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
        return ModelDirectory(llama)

    return configure


@pytest.mark.parametrize(
    ("kind", "own", "on_new", "on_old"),
    [
        ("torch", "bfloat16", "bfloat16", "float32"),
        ("eager", "bfloat16", "bfloat16", "float32"),
        ("onnx", "bfloat16", "float32", "float32"),
        ("torch", "float16", "float32", "float32"),
        ("torch", "float32", "float32", "float32"),
        ("torch", "float8_e4m3fn", "float32", "float32"),
        ("torch", None, "float32", "float32"),
    ],
)
def test_auto_on_a_processor(configured: Configured, kind: Kind, own: str | None, on_new: Dtype, on_old: Dtype) -> None:
    directory = configured(dtype=own, torch_dtype=None)
    assert dtype_of(directory, Placement(kind), lambda _: True) == on_new
    assert dtype_of(directory, Placement(kind), lambda _: False) == on_old


def test_older_files_name_it_otherwise(configured: Configured) -> None:
    directory = configured(dtype=None, torch_dtype="bfloat16")
    assert dtype_of(directory, Placement(), lambda _: True) == "bfloat16"


def test_auto_on_a_gpu(configured: Configured) -> None:
    asked: list[str] = []

    def no(device: str) -> bool:
        asked.append(device)
        return False

    assert dtype_of(configured(dtype="float16"), Placement(device="cuda:1"), no) == "float16"
    assert dtype_of(configured(dtype="bfloat16"), Placement(device="cuda:1"), no) == "float32"
    assert asked == ["cuda:1"]


def test_auto_is_an_exports_own(configured: Configured) -> None:
    directory = configured(dtype="float32")
    try:
        (directory.path / "model.onnx").touch()
        (directory.path / "specdec.json").write_text(json.dumps({"dtype": "float16"}))
        assert dtype_of(directory, Placement("onnx")) == "float16"
        with pytest.raises(ModelDirectoryError, match="exported in float16, not float32"):
            dtype_of(directory, Placement("onnx", "float32"))
    finally:
        (directory.path / "model.onnx").unlink()
        (directory.path / "specdec.json").unlink()


@pytest.mark.parametrize("wanted", ["float32", "bfloat16"])
def test_what_is_asked_for_is_given(configured: Configured, wanted: WantedDtype) -> None:
    assert dtype_of(configured(dtype="bfloat16"), Placement(dtype=wanted), lambda _: False) == wanted
