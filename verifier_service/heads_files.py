"""The heads of a verifier: their files, checked before the target is loaded, and the proposer made of them after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec.decoding.level_tree import GUESSES, MAX_NODES, FixedTree
from specdec.engine.engine import Engine, Placed, hidden_states, layer_features
from specdec.engine.heads import kinds
from specdec.engine.heads.block_files import BlockFiles
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, is_integer, read_text
from specdec.engine.unsupported import UnsupportedModelError

if TYPE_CHECKING:  # imports torch
    from verifier_service.proposers.heads import HeadsProposer


@dataclass(frozen=True)
class HeadsFiles:
    """Heads that fit a target, by the headers of their files."""

    files: kinds.HeadsFiles
    target: TargetShape
    tree: FixedTree | None

    def load(self, engine: Engine) -> HeadsProposer[Any]:
        """Read the weights onto the target's device, in its dtype. UnsupportedModelError if the engine lacks the states
        that they read, or its device the memory."""
        import torch

        try:
            return self._loaded(engine)
        except torch.OutOfMemoryError as error:  # raised for GPU memory only
            reason = str(error).partition(". ")[0]  # the rest is statistics
            raise UnsupportedModelError(f"{self.files.path}: {reason}; use fewer --kv-tokens") from error

    def _loaded(self, engine: Engine) -> HeadsProposer[Any]:
        from specdec.engine.hf.pretrained import DTYPES

        source = hidden_states(engine)
        assert isinstance(engine, Placed)  # as all engines with hidden states
        device, dtype = engine.device, DTYPES[engine.dtype]
        if isinstance(self.files, MedusaFiles):
            from verifier_service.proposers.medusa import MedusaProposer

            return MedusaProposer(self.files.load(self.target, source.output_head, device, dtype), self.tree)
        import torch

        from specdec.engine.heads.text_memory import TextMemory
        from verifier_service.proposers.block import BlockProposer
        from verifier_service.proposers.eagle3 import Eagle3Proposer
        from verifier_service.proposers.feature_heads import CONTEXT

        features, config = layer_features(engine), self.files.config
        if features.layer_count() != self.target.layers:
            raise HeadsFilesError(
                f"{self.files.path}: is for {self.target.layers} layers, but the model runs {features.layer_count()}"
            )
        embeddings = features.token_embeddings()
        # As many rows as the target's KV cache has: a text that fits there fits here.
        width = config.layer.width
        memory = TextMemory(engine.capacity, config.memory_heads, width, dtype, torch.device(device))
        context = min(CONTEXT, config.layer.context)
        if isinstance(self.files, BlockFiles):
            draft = self.files.load(embeddings, source.output_head, device, dtype)
            return BlockProposer(draft, config.layers, memory, context=context)
        heads = self.files.load(embeddings, source.output_head, device, dtype)
        return Eagle3Proposer(heads, config.layers, memory, context=context)


def read_heads(path: Path, tree: Path | None, directory: ModelDirectory) -> HeadsFiles:
    """Return the heads in a directory, for a target; ModelDirectoryError if they do not fit it, or the tree does not
    fit them."""
    target = TargetShape.of(directory)
    files = kinds.heads_in(path, target)
    if tree is None:
        return HeadsFiles(files, target, None)
    if not isinstance(files, MedusaFiles):
        raise ModelDirectoryError(f"{tree}: is for Medusa heads; {path} has {files.architecture}, whose trees grow")
    return HeadsFiles(files, target, _tree(tree, files.heads))


def _tree(file: Path, heads: int) -> FixedTree:
    content = read_text(file)
    if content is None:
        raise ModelDirectoryError(f"{file}: there is no such file")
    try:
        paths = json.loads(content)
    except ValueError as error:
        raise ModelDirectoryError(f"{file}: is not JSON: {error}") from None
    if not isinstance(paths, list) or not 1 <= len(paths) <= MAX_NODES:
        raise ModelDirectoryError(f"{file}: must be a list of 1 to {MAX_NODES} paths")
    for path in paths:
        if not isinstance(path, list) or not 1 <= len(path) <= heads:
            raise ModelDirectoryError(f"{file}: has {path}, must have lists of 1 to {heads} ranks, one for each head")
        if not all(is_integer(rank, 0, GUESSES - 1) for rank in path):
            raise ModelDirectoryError(f"{file}: has {path}, must have ranks from 0 to {GUESSES - 1}")
    try:
        return FixedTree(paths)
    except ValueError as error:
        raise ModelDirectoryError(f"{file}: {error}") from None
