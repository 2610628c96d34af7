"""Block drafts in the verifier, DFlash and DSpark: one pass guesses a block of tokens for each text.

The pass gives the logits of all positions. A tree is grown from them level by level, as for the other heads: without a
Markov head, all nodes of a level have the same guesses; with one, a node's guesses depend on its token.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.engine.heads.block import BlockDraft
from specdec.engine.heads.text_memory import TextMemory
from verifier_service.proposers.feature_heads import BEAM, CONTEXT, Asked, FeatureHeadsProposer, Growth, Level, Rows
from verifier_service.settings.tuning import DEFAULTS, DraftModelTuning


class BlockProposer(FeatureHeadsProposer[BlockDraft]):
    """The block draft of a verifier. The memory has the heads of all its layers in a row."""

    def __init__(
        self,
        draft: BlockDraft,
        layers: Sequence[int],
        memory: TextMemory,
        tuning: DraftModelTuning = DEFAULTS.draft_model,
        *,
        context: int = CONTEXT,
    ) -> None:
        row_logits = max(BEAM, draft.guesses) * draft.shape.outputs
        super().__init__(draft, layers, memory, tuning, depth=draft.guesses, context=context, row_logits=row_logits)

    def _keep(self, rows: Rows, fused: Tensor, positions: Tensor) -> None:
        self._heads.read(fused, positions, np.concatenate(rows.slots), self._memory)

    def _growth(self, group: Asked, levels: int) -> Growth:
        anchors = self._tensor([session.tree.committed[-1] for session, _ in group])
        positions = self._tensor([session.tree.base - 1 for session, _ in group])
        seen = [text.slots.last(self.context) for _, text in group]
        states = self._heads.states(anchors, positions, seen, self._memory)[:, :levels]
        return _Growth(self._heads, states)


class _Growth(Growth):
    """Trees that grow along the positions of a block."""

    def __init__(self, draft: BlockDraft, states: Tensor) -> None:
        """`states`: [n, levels, d']."""
        self._draft = draft
        self._states = states
        self._logits = draft.logits(states)
        self._level = 0
        self._memory: Tensor | None = None  # what the Markov head remembers of the frontier before
        self._every = torch.arange(len(states), device=states.device)[:, None]

    def level(self, tokens: Tensor, origins: Tensor) -> Level:
        draft, at = self._draft, slice(self._level, self._level + 1)
        self._level += 1
        logits, states = self._logits[:, at], self._states[:, at].expand(-1, tokens.shape[1], -1)
        if draft.variant.markov is not None:
            remembered = None if self._memory is None else self._memory[self._every, origins]
            by_token, self._memory = draft.markov(tokens, states, remembered)
            logits = logits + by_token
        if not draft.variant.confidence:
            return Level(logits)
        return Level(logits, draft.confidence(tokens, states).double().sigmoid().cpu().numpy())
