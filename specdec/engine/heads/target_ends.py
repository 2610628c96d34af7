"""The two ends of a target's weights: its token embeddings and its output head.

Published heads often use these instead of ends of their own. A draft service with such heads reads only the ends from
the target's directory.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specdec.engine.heads.files import HeadsFilesError, Reader, Stored, TargetShape, stored_tensors
from specdec.engine.preflight.weights import EMBEDDINGS

if TYPE_CHECKING:  # torch takes seconds to import
    import torch
    from torch import Tensor

OUTPUTS = ("lm_head.weight",)
"""Name suffixes of output heads in transformers' models. A model without one uses its embeddings."""

IN_LAYERS = re.compile(r".*layers\.|mtp\.")
"""Beginning of the names of layers' tensors. Copies of the ends in an MTP layer are not read."""


class StoredEnds(NamedTuple):
    """The tensors of the two ends; None for one that was not asked for. They are one tensor if the model ties them."""

    embeddings: Stored | None
    output: Stored | None

    @property
    def numbers(self) -> int:
        return sum(end.numbers for end in {self.embeddings, self.output} if end is not None)

    @classmethod
    def of(cls, path: Path, shape: TargetShape, wanted: Collection[str]) -> StoredEnds:
        """Return the `wanted` ends of the model in a directory; HeadsFilesError, naming the tensor, if one is missing,
        has another size, or is not a single matrix."""
        if not wanted:
            return cls(None, None)
        tensors = [tensor for tensor in stored_tensors(path) if not IN_LAYERS.match(tensor.name)]
        embeddings = _one(path, tensors, EMBEDDINGS, "token embeddings")
        heads = [tensor for tensor in tensors if tensor.name.endswith(OUTPUTS)]
        others = [tensor.name for tensor in tensors if "lm_head" in tensor.name and not tensor.name.endswith(OUTPUTS)]
        if "output" in wanted and others:
            raise HeadsFilesError(
                f"{path}: has {others[0]}, which is not read: heads need an output head of one matrix"
            )
        output = heads[0] if heads else embeddings
        embeddings.check((shape.vocabulary, embeddings.shape[1]), "the target's vocabulary")
        output.check((shape.vocabulary, shape.hidden), "the target's output head")
        return cls(embeddings if "embeddings" in wanted else None, output if "output" in wanted else None)


class TargetEnds(NamedTuple):
    """Token embeddings [ids, width], and an output head [ids, hidden]. Each is empty unless it was read."""

    embeddings: Tensor
    output: Tensor

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [n, ids] of states [n, hidden]."""
        import torch.nn.functional as F

        return F.linear(states, self.output)


def ends_of(
    path: Path, shape: TargetShape, device: str, dtype: torch.dtype, wanted: Collection[str] = ("embeddings", "output")
) -> TargetEnds:
    """Read the `wanted` ends of the model in a directory, tied ends once; HeadsFilesError as by `StoredEnds.of`."""
    import torch

    stored, read = StoredEnds.of(path, shape, wanted), Reader()
    tensors: dict[Stored | None, Tensor] = {None: torch.empty(0, 0)}
    for end in {*stored}:
        if end is not None:
            tensors[end] = read(end).to(device, dtype)
    return TargetEnds(tensors[stored.embeddings], tensors[stored.output])


def _one(path: Path, tensors: Sequence[Stored], names: tuple[str, ...], what: str) -> Stored:
    found = [tensor for tensor in tensors if tensor.name.endswith(names)]
    if len(found) != 1:
        listed = ", ".join(tensor.name for tensor in found) or "none"
        raise HeadsFilesError(f"{path}: has {listed} as {what}, must have one tensor named *{' or *'.join(names)}")
    if len(found[0].shape) != 2:
        raise HeadsFilesError(f"{path}: {found[0].name} has the shape {list(found[0].shape)}, must be a matrix")
    return found[0]
