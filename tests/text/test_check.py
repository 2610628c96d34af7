"""Everything that an orchestrator reads of a model is checked before anything starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.text.check import check_text
from tests.models import make


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("tokenizer.json", {"model": {"vocab": {"a": 0}}}, "tokenizer.json: cannot be used"),
        ("tokenizer_config.json", {"chat_template": "{% if %}"}, "tokenizer_config.json: the chat template cannot be"),
        (
            "tokenizer_config.json",
            {"chat_template": [{"name": "a", "template": ""}]},
            "has a, must be .*default",
        ),
        ("tokenizer_config.json", {"bos_token": 5}, "bos_token is 5, must be a string"),
        ("generation_config.json", {"top_p": 2}, r"generation_config.json: top_p is 2, must be in \(0, 1\]"),
    ],
)
def test_what_cannot_be_used_is_named(tmp_path: Path, file: str, content: object, said: str) -> None:
    directory = make("llama", tmp_path / "m")
    check_text(ModelDirectory(directory))
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(ModelDirectoryError, match=said):
        check_text(ModelDirectory(directory))
