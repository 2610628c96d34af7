"""The heads of a verifier: their files, checked before the target is loaded, and the proposer made of them after."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.decoding.level_tree import GUESSES, MAX_NODES, FixedTree
from specdec.engine.engine import Engine, Placed, hidden_states
from specdec.engine.heads.medusa_files import MedusaFiles, TargetShape
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, is_integer, read_text

if TYPE_CHECKING:  # imports torch
    from verifier_service.proposers.medusa import MedusaProposer


@dataclass(frozen=True)
class HeadsFiles:
    """Heads that fit a target, by the headers of their files."""

    medusa: MedusaFiles
    tree: FixedTree | None

    def load(self, engine: Engine) -> MedusaProposer:
        """Read the weights onto the target's device, in its dtype."""
        from specdec.engine.hf.pretrained import DTYPES
        from verifier_service.proposers.medusa import MedusaProposer

        source = hidden_states(engine)
        assert isinstance(engine, Placed)  # as all engines with hidden states
        target = TargetShape(source.hidden_size, engine.vocabulary)
        return MedusaProposer(
            self.medusa.load(target, source.output_head, engine.device, DTYPES[engine.dtype]), self.tree
        )


def read_heads(path: Path, tree: Path | None, directory: ModelDirectory) -> HeadsFiles:
    """Return the heads in a directory, for a target; ModelDirectoryError if they do not fit it, or the tree does not
    fit them."""
    medusa = MedusaFiles.of(path, TargetShape.of(directory))
    return HeadsFiles(medusa, None if tree is None else _tree(tree, medusa.heads))


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
