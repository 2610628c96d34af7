"""A model without stored weights, for measuring shapes that nobody has the weights of. No service loads one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError


@dataclass(frozen=True)
class RandomWeights(ModelDirectory):
    """A model directory of which only config.json is needed: the engine draws random weights on its device. It has no
    tokenizer, and its text means nothing."""

    def __post_init__(self) -> None:
        self._check_configuration()

    @cached_property
    def model_fingerprint(self) -> str:
        """Always a ModelDirectoryError: an export would be cached, and found again, under the fingerprint of weights
        that may lie in the same directory."""
        raise ModelDirectoryError(f"{self.path}: random weights are not exported: take the engine torch or eager")
