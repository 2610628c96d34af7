"""A model directory provides weights and numbers, never code."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.engine.hf import attention_hook
from specdec.engine.hf.checkpoint import NAMES_CODE, vetted
from specdec.engine.hf.pretrained import load
from specdec.engine.model_directory import INDEX, WEIGHTS, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check_model
from tests.models import make


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


class Executed:
    """Creates a folder when unpickled."""

    def __init__(self, trace: Path) -> None:
        self._trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._trace),)


def edit(folder: Path, **fields: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))


CODE: dict[str, Any] = {
    "attn_implementation": "kernels-community/flash-attn",
    "_attn_implementation": "somebody/attention:forward",
    "_attn_implementation_internal": "somebody/attention",
    "experts_implementation": "somebody/experts",
    "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    "custom_generate": "somebody/generate",
    "use_kernels": True,
    "kernel_config": {"RMSNorm": "somebody/norm:Norm"},
}


@pytest.mark.parametrize("field", CODE)
def test_a_configuration_that_names_code_is_not_followed(folder: Path, source: Path, field: str) -> None:
    edit(folder, **{field: CODE[field]})
    (folder / "code.py").write_text("raise SystemExit('executed')\n")
    model = load(check_model(Wanted(folder, Placement("torch"))), torch.float32, "cpu")
    assert model.config._attn_implementation == attention_hook.NAME
    assert not model.use_kernels
    original = load(ModelDirectory(source), torch.float32, "cpu").state_dict()
    assert all(torch.equal(original[name], tensor) for name, tensor in model.state_dict().items())


def test_nor_is_one_inside_it(folder: Path) -> None:
    inside = {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 256}
    edit(
        folder,
        text_config=inside | {"_attn_implementation": "somebody/attention"},
        vision_config={"auto_map": {}, "depth": 2},
    )
    with vetted(ModelDirectory(folder)) as view:
        seen = json.loads((view / "config.json").read_text())
    assert (seen["text_config"], seen["vision_config"]) == (inside, {"depth": 2})
    assert not NAMES_CODE & seen.keys()


def test_nothing_beside_the_weights_is_seen(folder: Path, tmp_path: Path) -> None:
    """Pickles, adapters, optimizer states, code: each would run on loading."""
    trace = tmp_path / "executed"
    planted = pickle.dumps(Executed(trace))
    beside = (
        "pytorch_model.bin",
        "adapter_model.bin",
        "optimizer.pt",
        "training_args.bin",
        "scheduler.pt",
        "rng_state.pth",
    )
    for name in beside:
        (folder / name).write_bytes(planted)
    (folder / "adapter_config.json").write_text(
        json.dumps({"base_model_name_or_path": "somebody/else", "peft_type": "LORA"})
    )
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": {"x": "pytorch_model.bin"}}))
    directory = check_model(Wanted(folder, Placement("torch")))
    with vetted(directory) as view:
        assert sorted(os.listdir(view)) == ["config.json", WEIGHTS]
        assert view.stat().st_mode & 0o077 == 0
    assert not view.exists()
    load(directory, torch.float32, "cpu")
    assert not trace.exists()


@pytest.mark.parametrize("index", [False, True])
def test_a_pickle_alone_is_refused(folder: Path, tmp_path: Path, index: bool) -> None:
    trace = tmp_path / "executed"
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Executed(trace)))
    if index:  # listed in an index of safetensors files
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model.bin"}}))
    said = (
        "must have names of safetensors files" if index else "pytorch_model.bin has another format: save the model as"
    )
    for use in (
        lambda: check_model(Wanted(folder, Placement("torch"))),
        lambda: load(ModelDirectory(folder), torch.float32, "cpu"),
    ):
        with pytest.raises(ModelDirectoryError) as refused:
            use()
        assert said in str(refused.value) or "no file named model.safetensors" in str(refused.value)
    assert not trace.exists()


def test_an_error_names_the_directory_itself(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(b"nothing")
    with pytest.raises(ModelDirectoryError) as refused:
        load(ModelDirectory(folder), torch.float32, "cpu")
    assert "specdec-checkpoint" not in str(refused.value)
