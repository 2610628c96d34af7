"""The model that a draft's training starts from, checked before torch is imported."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from specdec.engine.gguf_file import is_gguf, open_model
from specdec.engine.hf.random_weights import RandomWeights
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.architectures import check_architecture
from specdec.engine.preflight.check import Wanted, check_model
from specdec.engine.unsupported import UnsupportedModelError


@dataclass(frozen=True)
class GivenDraft:
    """A draft to train."""

    directory: ModelDirectory  # with random weights, only its configuration
    tokenizer: ModelDirectory  # the source of the trained draft's tokenizer

    @classmethod
    def checked(cls, path: Path, target: ModelDirectory, device: str, *, untrained: bool, seed: int = 0) -> GivenDraft:
        """Return the draft in a directory or GGUF file; ModelDirectoryError or UnsupportedModelError, naming the
        reason, if it cannot be trained for a target and then served. `untrained`: start from random weights drawn by
        `seed`, for which a configuration suffices; without its own tokenizer, the draft gets the target's."""
        if untrained:
            directory: ModelDirectory = RandomWeights(open_model(path).path if is_gguf(path) else path, seed)
            check_architecture(directory)
            has_tokenizer = (directory.path / "tokenizer.json").is_file()
            tokenizer = ModelDirectory(directory.path) if has_tokenizer else target
        else:
            tokenizer = directory = check_model(Wanted(path, Placement("eager", device=device)))
        tokenizer.check_pair(target)
        if directory.quantisation is not None:
            raise UnsupportedModelError(
                f"{path}: has quantised weights (quantization_config in config.json), which do not learn: give the "
                "model that it was quantised from"
            )
        return cls(directory, tokenizer)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of the configuration and the weights; of the configuration alone if the weights are
        random."""
        if not isinstance(self.directory, RandomWeights):
            return self.directory.model_fingerprint
        return hashlib.sha256(json.dumps(self.directory.whole_config, sort_keys=True).encode()).hexdigest()
