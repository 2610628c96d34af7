"""The bundled pair and a newly trained pair render conversations."""

from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from demo.train import HOME, SHAPES, tokenizer_settings
from specdec.engine.model_directory import ModelDirectory
from specdec.text.tokenizer import ChatTemplateError, Tokenizer

NOON = datetime(2024, 2, 29, 12, tzinfo=UTC)


def said(*turns: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": content} for role, content in turns]


@pytest.mark.parametrize("role", SHAPES)
def test_what_is_bundled_is_what_training_writes(role: str) -> None:
    assert json.loads((HOME / role / "tokenizer_config.json").read_text()) == tokenizer_settings()


def test_what_is_said_becomes_comments_and_answers_are_code() -> None:
    tokenizer = Tokenizer(ModelDirectory(HOME / "target"))
    turns = [("system", "Be brief.\nBe kind."), ("user", " Print 1. "), ("assistant", "print(1)"), ("user", "Again.")]
    assert tokenizer.render(said(*turns), NOON) == "# Be brief.\n# Be kind.\n# Print 1.\nprint(1)\n\n# Again.\n"
    with pytest.raises(ChatTemplateError, match="no turn of the role tool"):
        tokenizer.render(said(("tool", "1")), NOON)
