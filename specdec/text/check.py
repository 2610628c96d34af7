"""Preflight of an orchestrator: what it reads of a model can be used."""

from __future__ import annotations

from specdec.engine.model_directory import ModelDirectory
from specdec.text.generation_defaults import GenerationDefaults
from specdec.text.tokenizer import Tokenizer


def check_text(directory: ModelDirectory) -> None:
    """Raise ModelDirectoryError unless the tokenizer works, the chat template can be compiled, and the generation
    defaults are what a request could ask for. Configuration and files were checked with the directory."""
    Tokenizer(directory)
    GenerationDefaults.of(directory)
