"""Incomplete weights are detected from their headers, before anything is loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from specdec.engine.model_directory import INDEX, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.preflight.weights import check_weights

DEMO = Path(__file__).parent.parent.parent / "demo" / "target"
WEIGHTS = "model.safetensors"


def cut(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:-1000])


def index(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "gone": (lambda folder: (folder / WEIGHTS).unlink(), "no weights"),
    "empty": (lambda folder: (folder / WEIGHTS).write_bytes(b""), "its header is truncated"),
    "page": (lambda folder: (folder / WEIGHTS).write_bytes(b"version https://git-lfs"), "its header is truncated"),
    "damaged": (lambda folder: (folder / WEIGHTS).write_bytes(b"\x02" + bytes(7) + b"[]"), "its header is damaged"),
    "cut": (cut, "bytes, must have"),
    "index": (index, "lists model-2.safetensors, which does not exist (1 of 2 files missing)"),
}


def names(file: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))

    return write


ELSEWHERE = {
    "a pickle": (names("pytorch_model.bin"), "must have names of safetensors files"),
    "another folder": (names("../model.safetensors"), "must have names of safetensors files"),
    "nothing": (names(""), "must have names of safetensors files"),
}
BROKEN |= ELSEWHERE


def test_complete_weights_are_taken() -> None:
    check_weights(ModelDirectory(DEMO))


@pytest.mark.parametrize("case", BROKEN)
def test_incomplete_weights_are_refused(tmp_path: Path, case: str) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    breaking, said = BROKEN[case]
    breaking(folder)
    with pytest.raises(ModelDirectoryError) as error:
        check_weights(ModelDirectory(folder))
    assert said in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def test_tokenizers_that_differ_say_how(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "model"))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["added_tokens"].append({"content": "<other>", "id": 100_000})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(
        ModelDirectoryError, match=r'tokens; id 100000 is nothing and "<other>"\): the models cannot be used together'
    ):
        ModelDirectory(folder).check_pair(ModelDirectory(DEMO))
