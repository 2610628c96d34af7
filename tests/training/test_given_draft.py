"""Checks of the model that a draft's training begins with, made without torch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.unsupported import UnsupportedModelError
from specdec.training.files import PLAN, STATE, TEXTS, clear, is_unused
from specdec.training.given_draft import GivenDraft
from tests.models import make


@pytest.fixture
def target(tmp_path: Path) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path / "target"))


def test_a_draft_of_another_architecture_may_be_trained(target: ModelDirectory, tmp_path: Path) -> None:
    draft = GivenDraft.checked(make("gpt2", tmp_path / "draft"), target, "cpu", untrained=False)
    assert draft.fingerprint == draft.directory.model_fingerprint
    assert draft.tokenizer == draft.directory


def test_random_weights_need_a_configuration_alone(target: ModelDirectory, tmp_path: Path) -> None:
    path = make("qwen3", tmp_path / "draft")
    whole = GivenDraft.checked(path, target, "cpu", untrained=True)
    assert whole.tokenizer.path == path
    (path / "model.safetensors").unlink()
    (path / "tokenizer.json").unlink()
    alone = GivenDraft.checked(path, target, "cpu", untrained=True)
    assert alone.tokenizer == target
    assert alone.fingerprint == whole.fingerprint
    with pytest.raises(ModelDirectoryError, match=r"draft: no tokenizer.json"):
        GivenDraft.checked(path, target, "cpu", untrained=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    assert GivenDraft.checked(path, target, "cpu", untrained=True).fingerprint != alone.fingerprint


@pytest.mark.parametrize("untrained", [False, True])
def test_what_could_not_draft_is_refused(target: ModelDirectory, tmp_path: Path, untrained: bool) -> None:
    path = Path(shutil.copytree(target.path, tmp_path / "draft"))
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    tokenizer["added_tokens"][0]["content"] = "<other>"
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelDirectoryError, match=r"the tokenizers of \S+/target and \S+/draft differ"):
        GivenDraft.checked(path, target, "cpu", untrained=untrained)
    shutil.copy(target.path / "tokenizer.json", path)
    config = json.loads((path / "config.json").read_text())
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    (path / "config.json").write_text(json.dumps(config | quantised))
    with pytest.raises(UnsupportedModelError, match=r"draft: has quantised weights .* which do not learn: give"):
        GivenDraft.checked(path, target, "cpu", untrained=untrained)
    (path / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    with pytest.raises(UnsupportedModelError, match="architecture mamba is not supported"):
        GivenDraft.checked(path, target, "cpu", untrained=untrained)


def test_a_training_begins_where_there_is_nothing_to_lose(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert is_unused(out)
    out.mkdir()
    assert is_unused(out)
    for name in (TEXTS, f"{TEXTS}.partial", STATE):  # of a training killed before it had a plan
        (out / name).write_bytes(b"")
    assert is_unused(out)
    clear(out)
    assert not (out / STATE).exists()
    (out / PLAN).write_text("{}")
    assert not is_unused(out)
    (out / PLAN).unlink()
    (out / "model.safetensors").write_bytes(b"")
    assert not is_unused(out)
    assert not is_unused(out / "model.safetensors")
