"""Preflight of an orchestrator: checks the parts of a model that it reads."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.model_directory import ModelDirectory
from specdec.text.generation_defaults import GenerationDefaults
from specdec.text.tokenizer import Tokenizer


def check_text(directory: ModelDirectory, chat_template: Path | None = None) -> None:
    """Raise ModelDirectoryError unless the tokenizer works, the chat template (given or the model's) compiles, and the
    generation defaults are values that a request could set. ModelDirectory has already checked the rest."""
    Tokenizer(directory, chat_template)
    GenerationDefaults.of(directory)
