"""EAGLE-3 heads in the verifier (Li et al. 2025): trees of guesses that the heads read themselves."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.heads.eagle3 import Eagle3Heads, TreeContext
from specdec.engine.heads.text_memory import TextMemory
from verifier_service.proposers.feature_heads import BEAM, CONTEXT, Asked, FeatureHeadsProposer, Growth, Level, Rows
from verifier_service.settings.tuning import DEFAULTS, DraftModelTuning

DEPTH = 7
"""Maximum levels of a tree, as in the paper."""


class Eagle3Proposer(FeatureHeadsProposer[Eagle3Heads]):
    """The EAGLE-3 heads of a verifier."""

    def __init__(
        self,
        heads: Eagle3Heads,
        layers: Sequence[int],
        memory: TextMemory,
        tuning: DraftModelTuning = DEFAULTS.draft_model,
        *,
        context: int = CONTEXT,
    ) -> None:
        row_logits = BEAM * heads.shape.outputs
        super().__init__(heads, layers, memory, tuning, depth=DEPTH, context=context, row_logits=row_logits)

    def _keep(self, rows: Rows, fused: Tensor, positions: Tensor) -> None:
        self._heads.read(self._tensor(rows.tokens), fused, positions, np.concatenate(rows.slots), self._memory)

    def _growth(self, group: Asked, levels: int) -> Growth:
        seen = [text.slots.last(self.context)[:-1] for _, text in group]  # the tree begins with the last row
        context = TreeContext(self._memory, seen, 1 + BEAM * (levels - 1))
        read = torch.stack([text.state for _, text in group if text.state is not None])[:, None]
        # The row at a position holds the token after it.
        positions = self._tensor([[session.tree.base - 2] for session, _ in group])
        return _Growth(self._heads, context, read, positions)


class _Growth(Growth):
    """Trees that grow by what the layer makes of its own output."""

    def __init__(self, heads: Eagle3Heads, context: TreeContext, read: Tensor, positions: Tensor) -> None:
        """`read` [n, 1, d'] and `positions` [n, 1]: of the rows before the last tokens."""
        self._heads = heads
        self._context = context
        self._carried = read  # g of the frontier before, which the next one reads
        self._positions = positions  # of the next frontier
        self._every = torch.arange(len(read), device=read.device)[:, None]

    def level(self, tokens: Tensor, origins: Tensor) -> Level:
        read = self._carried[self._every, origins]
        positions = self._positions.expand_as(origins)
        states = self._heads.grow(tokens, read, positions, self._context, origins)
        logits, self._carried = self._heads.outcome(states)
        self._positions = self._positions + 1
        return Level(logits)
