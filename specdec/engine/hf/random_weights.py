"""A model that is a configuration alone, for measuring shapes nobody has the weights of. No service takes one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from specdec.engine.model_directory import ModelDirectory, ModelDirectoryError


@dataclass(frozen=True)
class RandomWeights(ModelDirectory):
    """A directory of which config.json is read and nothing else: an engine draws the weights at random, on its device.
    There is no tokenizer, and its text means nothing."""

    def __post_init__(self) -> None:
        self._check_configuration()

    @cached_property
    def model_fingerprint(self) -> str:
        """There is none: an export would be kept, and found again, under the name of weights that may lie beside."""
        raise ModelDirectoryError(f"{self.path}: random weights are not exported: take the engine torch or eager")
