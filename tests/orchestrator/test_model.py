"""The text fingerprint, by which orchestrators verify that they interpret requests alike."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.requests.model import ServedModel
from specdec.engine.model_directory import ModelDirectory
from tests.models import make


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "m")


def edit(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))


def normalised(directory: Path) -> None:
    edit(directory / "tokenizer.json", lambda content: content.update(normalizer={"type": "Lowercase"}))


def another_begin(directory: Path) -> None:
    edit(directory / "tokenizer_config.json", lambda content: content.update(bos_token="</s>"))


def another_template(directory: Path) -> None:
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")


def another_end(directory: Path) -> None:
    edit(directory / "generation_config.json", lambda content: content.update(eos_token_id=[2, 5]))


def test_names(source: Path) -> None:
    directory = ModelDirectory(source)
    named = [ServedModel.of(directory, *names) for names in ((), ("a",), ("b", "a", "b"))]
    assert [(model.name, model.aliases) for model in named] == [("m", ()), ("a", ()), ("b", ("a",))]


def test_a_copy_has_the_same_fingerprint(source: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(source, tmp_path / "another-name")
    assert (
        ServedModel.of(ModelDirectory(source)).text_fingerprint == ServedModel.of(ModelDirectory(copy)).text_fingerprint
    )


@pytest.mark.parametrize("change", [normalised, another_begin, another_template, another_end])
def test_what_else_a_request_depends_on_shows(source: Path, tmp_path: Path, change: Callable[[Path], None]) -> None:
    """The tokenizer fingerprint stays equal: draft and target may be paired."""
    copy = shutil.copytree(source, tmp_path / "m")
    change(copy)
    before, after = ServedModel.of(ModelDirectory(source)), ServedModel.of(ModelDirectory(copy))
    assert before.tokenizer_fingerprint == after.tokenizer_fingerprint
    assert before.text_fingerprint != after.text_fingerprint
