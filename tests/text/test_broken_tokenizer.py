"""A broken tokenizer or chat template ends the start with a one-line error, even if a library panics."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.text.tokenizer import Tokenizer
from tests.models import make

TEXT = "must be a string of Unicode characters"
DEFAULT = "must be a template, or named ones with one of the name default"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make("llama", tmp_path / "m")


def edit(file: Path, **fields: Any) -> None:
    """Replace fields of a JSON file."""
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def refused(directory: Path) -> str:
    """Return the one-line error for a tokenizer."""
    with pytest.raises(ModelDirectoryError) as error:
        Tokenizer(ModelDirectory(directory))
    line = str(error.value)
    assert len(line.splitlines()) == 1
    assert len(line) < 600
    return line


@pytest.mark.parametrize(
    "fields",
    [
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
        {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
        {"normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": "x"}},
    ],
    ids=["when read", "over any text", "over this text"],
)
def test_a_tokenizer_that_panics(directory: Path, fields: Any, capfd: pytest.CaptureFixture[str]) -> None:
    """Otherwise, a tokenizer that panics over a text would do so in every request. Rust's own output is suppressed."""
    edit(directory / "tokenizer.json", **fields)
    assert refused(directory).startswith(f"{directory / 'tokenizer.json'}: cannot be used: ")
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, f"bos_token is 5, {TEXT}"),
        (["<s>"], f'bos_token is ["<s>"], {TEXT}'),
        ({"content": 5}, f"bos_token.content is 5, {TEXT}"),
        ({"lstrip": False}, f"bos_token.content is missing, {TEXT}"),
        ("\ud800", f'bos_token is "\\ud800", {TEXT}'),
    ],
)
def test_odd_special_tokens(directory: Path, value: Any, said: str) -> None:
    edit(directory / "tokenizer_config.json", bos_token=value)
    assert refused(directory) == f"{directory / 'tokenizer_config.json'}: {said}"


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (5, f"chat_template is 5, {TEXT}"),
        ({"default": 5}, f"chat_template.default is 5, {TEXT}"),
        ("\udfff", f'chat_template is "\\udfff", {TEXT}'),
        ([1], "chat_template is [1], must be a list of objects"),
        ([{"template": "x"}], f"chat_template[0].name is missing, {TEXT}"),
        ([{"name": "default", "template": 5}], f"chat_template[0].template is 5, {TEXT}"),
        ([{"name": "rag", "template": "x"}], f"chat_template has rag, {DEFAULT}"),
        ({"tool_use": "x"}, f"chat_template has tool_use, {DEFAULT}"),
    ],
)
def test_odd_chat_templates(directory: Path, value: Any, said: str) -> None:
    edit(directory / "tokenizer_config.json", chat_template=value)
    assert refused(directory) == f"{directory / 'tokenizer_config.json'}: {said}"


@pytest.mark.parametrize(
    "source",
    [b"\xff", b"{{" + b"(" * 5_000 + b"1" + b")" * 5_000 + b"}}", b"{% for a in b %}" * 60 + b"{% endfor %}" * 60],
    ids=["not UTF-8", "nested", "loops"],
)
def test_chat_templates_that_cannot_be_compiled(directory: Path, source: bytes) -> None:
    (directory / "chat_template.jinja").write_bytes(source)
    assert refused(directory).startswith(f"{directory / 'chat_template.jinja'}: ")


@pytest.mark.parametrize(
    ("making", "said"),
    [
        (Path.mkdir, ": is not a regular file"),
        (os.mkfifo, ": is not a regular file"),
        (lambda file: file.symlink_to("gone"), ' (a link to "gone"): cannot be read: No such file or directory'),
    ],
    ids=["directory", "fifo", "dangling"],
)
def test_chat_templates_that_cannot_be_read(directory: Path, making: Callable[[Path], object], said: str) -> None:
    making(directory / "chat_template.jinja")
    assert refused(directory) == f"{directory / 'chat_template.jinja'}{said}"
