"""The weights read are those that transformers would read, whatever other files are present."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import safetensors.torch
import torch

from specdec.engine.hf.pretrained import load
from specdec.engine.model_directory import INDEX, WEIGHTS, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check_model
from specdec.engine.preflight.weights import bytes_of
from tests.models import make


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "model")


@pytest.fixture
def folder(source: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(source, tmp_path / "model"))


def sharded(folder: Path) -> None:
    """Split the tensors into two files and an index."""
    tensors = safetensors.torch.load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    index: dict[str, str] = {}
    for part in (0, 1):
        name = f"model-{part}.safetensors"
        mine = {key: tensor for at, (key, tensor) in enumerate(sorted(tensors.items())) if at % 2 == part}
        safetensors.torch.save_file(mine, folder / name, metadata={"format": "pt"})
        index |= dict.fromkeys(mine, name)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))


def another(name: str) -> Callable[[Path], None]:
    """Return a function that adds a file of other tensors, too large for any machine."""

    def write(folder: Path) -> None:
        head = json.dumps({"x": {"dtype": "F32", "shape": [1 << 50], "data_offsets": [0, 1 << 52]}}).encode()
        (folder / name).write_bytes(len(head).to_bytes(8, "little") + head)

    return write


BESIDE = ("consolidated.safetensors", "adapter_model.safetensors", "model-00001-of-00002.safetensors")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("beside", BESIDE)
def test_files_that_are_not_loaded_count_for_nothing(folder: Path, source: Path, split: bool, beside: str) -> None:
    if split:
        sharded(folder)
    counted = bytes_of(ModelDirectory(folder), 4)
    fingerprint = ModelDirectory(folder).model_fingerprint
    another(beside)(folder)
    directory = check_model(Wanted(folder, Placement("torch")))
    assert bytes_of(directory, 4) == counted == bytes_of(ModelDirectory(source), 4)
    assert directory.model_fingerprint == fingerprint
    original = load(ModelDirectory(source), torch.float32, "cpu").state_dict()
    assert all(
        torch.equal(original[key], tensor) for key, tensor in load(directory, torch.float32, "cpu").state_dict().items()
    )


def test_one_file_goes_before_an_index(folder: Path) -> None:
    another("model-1.safetensors")(folder)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": {"x": "model-1.safetensors"}}))
    assert check_model(Wanted(folder, Placement("torch"))).weights() == [folder / WEIGHTS]


def test_the_configuration_may_name_the_file(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "mine.safetensors")
    with pytest.raises(
        ModelDirectoryError, match=r"neither model\.safetensors nor .*: mine\.safetensors has a name that"
    ):
        check_model(Wanted(folder, Placement("torch")))
    config = json.loads((folder / "config.json").read_text())
    for name, good in (("mine.safetensors", True), ("../mine.safetensors", False), ("adapter_model.bin", False)):
        (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))
        if good:
            directory = check_model(Wanted(folder, Placement("torch")))
            assert directory.weights() == [folder / name]
            load(directory, torch.float32, "cpu")
        else:
            with pytest.raises(ModelDirectoryError, match=r"transformers_weights is .*, must be the name of a file"):
                check_model(Wanted(folder, Placement("torch")))
