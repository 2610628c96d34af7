"""The heads of a verifier: checks their files before the target is loaded, and makes the proposer afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.decoding.level_tree import GUESSES, MAX_NODES, FixedTree
from specdec.engine.engine import Engine, LayerFeatures, Placed, hidden_states, layer_features
from specdec.engine.heads import kinds
from specdec.engine.heads.feature_files import FeatureFiles
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, is_integer, read_text
from specdec.engine.shortage import within_gpu_memory

if TYPE_CHECKING:  # imports torch
    from verifier_service.proposers.feature_source import FeatureSource
    from verifier_service.proposers.heads import HeadsProposer


MAX_FEATURE_WINDOW = 4096
"""Maximum rows kept of a text for draft services: heads see no more."""


@dataclass(frozen=True)
class HeadsFiles:
    """Heads that fit a target, according to the headers of their files."""

    files: kinds.HeadsFiles
    tree: FixedTree | None

    def load(self, engine: Engine) -> HeadsProposer[Any]:
        """Read the weights onto the target's device, in its dtype. UnsupportedModelError if the engine lacks the states
        that the heads read, or its GPU lacks memory; HeadsFilesError if the loaded model has another number of
        layers."""
        with within_gpu_memory(self.files.path):
            return self._loaded(engine)

    def _loaded(self, engine: Engine) -> HeadsProposer[Any]:
        from specdec.engine.hf.pretrained import DTYPES

        source = hidden_states(engine)
        assert isinstance(engine, Placed)  # as all engines with hidden states
        device, dtype = engine.device, DTYPES[engine.dtype]
        if isinstance(self.files, MedusaFiles):
            from verifier_service.proposers.medusa import MedusaProposer

            return MedusaProposer(self.files.load(source.output_head, device, dtype), self.tree)
        import torch

        from specdec.engine.heads.growth import reader_of
        from specdec.engine.heads.text_memory import TextMemory
        from verifier_service.proposers.feature_heads import FeatureHeadsProposer

        features, config = layer_features(engine), self.files.config
        check_layers(self.files, features)
        heads = self.files.load(features.token_embeddings(), source.output_head, device, dtype)
        # As many rows as the target's KV cache has: a text that fits there fits here.
        memory = TextMemory(engine.capacity, config.memory_heads, config.layer.sizes.width, dtype, torch.device(device))
        return FeatureHeadsProposer(reader_of(heads, memory, config.layer.context), config.layers)


def feature_source(path: Path, window: int, directory: ModelDirectory, engine: Engine) -> FeatureSource:
    """Return the source of features for draft services that run the heads in a directory; it keeps `window` rows of a
    text. ModelDirectoryError or UnsupportedModelError if the target or the engine does not fit the heads, or the GPU
    lacks memory."""
    from specdec.engine.hf.pretrained import DTYPES
    from verifier_service.proposers.feature_source import FeatureSource

    files, features = kinds.feature_heads_in(path, TargetShape.of(directory)), layer_features(engine)
    check_layers(files, features)
    assert isinstance(engine, Placed)  # as all engines with features
    with within_gpu_memory(path):
        fusion = files.fusion(engine.device, DTYPES[engine.dtype])
    return FeatureSource(fusion, files.config.layers, files.fusion_fingerprint(), window)


def check_layers(files: FeatureFiles[Any], features: LayerFeatures) -> None:
    """Raise HeadsFilesError unless the model runs as many layers as its configuration has."""
    if features.layer_count() != files.target.layers:
        raise HeadsFilesError(
            f"{files.path}: needs a target of {files.target.layers} layers, but the loaded model runs "
            f"{features.layer_count()}"
        )


def read_heads(path: Path, tree: Path | None, directory: ModelDirectory) -> HeadsFiles:
    """Return the heads in a directory; ModelDirectoryError if they do not fit the target, or the tree does not fit
    them."""
    files = kinds.heads_in(path, TargetShape.of(directory))
    if tree is None:
        return HeadsFiles(files, None)
    if not isinstance(files, MedusaFiles):
        problem = f"needs Medusa heads; {path} has {files.architecture} heads, which build their own trees"
        raise ModelDirectoryError(f"{tree}: {problem}")
    return HeadsFiles(files, _tree(tree, files.heads))


def _tree(file: Path, heads: int) -> FixedTree:
    content = read_text(file)
    if content is None:
        raise ModelDirectoryError(f"{file}: does not exist")
    try:
        paths = json.loads(content)
    except ValueError as error:
        raise ModelDirectoryError(f"{file}: is not JSON: {error}") from None
    if not isinstance(paths, list) or not 1 <= len(paths) <= MAX_NODES:
        raise ModelDirectoryError(f"{file}: must be a list of 1 to {MAX_NODES} paths")
    for path in paths:
        if not isinstance(path, list) or not 1 <= len(path) <= heads:
            raise ModelDirectoryError(f"{file}: path {path} must be a list of 1 to {heads} ranks, one per level")
        if not all(is_integer(rank, 0, GUESSES - 1) for rank in path):
            raise ModelDirectoryError(f"{file}: path {path} must have ranks from 0 to {GUESSES - 1}")
    try:
        return FixedTree(paths)
    except ValueError as error:
        raise ModelDirectoryError(f"{file}: {error}") from None
