"""A model without stored weights, for benchmarks of model shapes without available weights. Services never load one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError


@dataclass(frozen=True)
class RandomWeights(ModelDirectory):
    """A model directory that needs only config.json: the engine draws random weights on its device. It has no
    tokenizer, and its text is meaningless. A configuration and a seed always give the same weights."""

    seed: int = 0

    def __post_init__(self) -> None:
        self._check_configuration()

    @cached_property
    def model_fingerprint(self) -> str:
        """Always raise ModelDirectoryError: an export would be cached under the fingerprint of any weights in the same
        directory, and later be taken for theirs."""
        raise ModelDirectoryError(f"{self.path}: random weights cannot be exported: use the engine torch or eager")
