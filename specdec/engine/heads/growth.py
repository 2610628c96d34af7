"""Growing trees with heads that read features: for many texts together, a level at a time, in a verifier or a draft
service.

A `HeadsReader` combines heads of one kind with the keys and values of rows they have read. Rows of texts may be stored
in any order. A tree grows from the last row of each text; the tree's own rows are not stored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.decoding.draft_logits import DraftLogits, HostDraftLogits, MappedDraftLogits
from specdec.engine.heads.block import BlockDraft
from specdec.engine.heads.feature_files import MAX_CONTEXT_BYTES, MAX_FEATURE_LOGITS
from specdec.engine.heads.text_memory import TextMemory, TreeContext
from specdec.engine.kv.slots import Slots

BEAM = 8
"""Nodes of a level that get children, and children per node. EAGLE uses 8 to 10."""

CONTEXT = 4096
"""Default limit on the rows that heads see. Published heads are trained on texts of 2,048 to 4,096 tokens."""

AUTOREGRESSIVE_DEPTH = 7
"""Maximum levels of a tree if heads read their own guesses, as in EAGLE-3's paper."""


class FeatureHeads(Protocol):
    """The interface of heads that read features."""

    vocabulary: int
    ids: NDArray[np.int64] | None  # [outputs]; None: output number = id

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def fused(self, features: Tensor) -> Tensor:
        """Return the fused features [n, d'] of features [n, m, d]."""


class AutoregressiveHeads(FeatureHeads, Protocol):
    """The interface of heads with one decoder layer that reads its own guesses: EAGLE-3 heads and MTP layers. A row
    pairs the fused features g of a position with the token after it."""

    outputs: int  # token ids they can guess

    def read(self, tokens: Tensor, fused: Tensor, positions: Tensor, slots: Slots, memory: TextMemory) -> None:
        """Store the keys and values of n rows of any texts, in any order, given tokens and positions, int64 [n], and g
        [n, d']: in a single layer they depend on nothing else."""

    def grow(self, tokens: Tensor, fused: Tensor, positions: Tensor, trees: TreeContext, origins: Tensor) -> Tensor:
        """Run the layer on a level of n trees, f rows each: tokens and positions [n, f], g [n, f, d']. `origins` [n,
        f]: the rows' parents in the previous level. Return the layer's outputs [n, f, d']."""

    def outcome(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [..., outputs], float32, of the layer's outputs [..., d'], and the g [..., d'] that
        children read."""


class Level(NamedTuple):
    """The logits for a level of trees, and the confidence of the heads."""

    logits: Tensor  # float32 [n, f, outputs] of the children of the frontier; [n, 1, outputs] if all nodes share them
    confidence: NDArray[np.float64] | None = None  # [n, f]: probability of the best child, if the heads estimate it


class Growth(ABC):
    """The state of heads while the trees of n texts grow."""

    @abstractmethod
    def level(self, tokens: Tensor, origins: Tensor) -> Level:
        """Return the logits after the frontier's tokens, int64 [n, f]. `origins` [n, f]: the places of the tokens'
        parents in the previous frontier. The first frontier is the last token of each text."""


class TreeAnchor(NamedTuple):
    """The end of a text, from which its tree grows."""

    token: int  # the last one
    length: int  # tokens of the text
    rows: Slots  # stored rows that the heads may see, up to the row before the last token
    state: Tensor  # [d'] fused features of the last of these rows


class HeadsReader(ABC):
    """Heads, and the memory for the keys and values of all texts. `depth`: maximum levels of a tree; `context`: maximum
    number of a text's latest rows that the heads see."""

    def __init__(self, heads: Any, memory: TextMemory, *, depth: int, context: int, text_logits: int) -> None:
        """`text_logits`: logits that a text needs in a pass."""
        self.heads: FeatureHeads = heads
        self.memory = memory
        self.depth = depth
        self.context = context
        self.texts_at_once = max(1, MAX_FEATURE_LOGITS // text_logits)
        """Maximum texts in a pass."""
        self.rows_at_once = max(1, MAX_CONTEXT_BYTES // memory.row_bytes)
        """Maximum rows gathered from memory in a pass, over all texts."""

    @abstractmethod
    def keep(self, tokens: Sequence[int], positions: Sequence[int], fused: Tensor, slots: Slots) -> None:
        """Store the keys and values of n rows of any texts, in any order. `tokens`: the token after each row; `fused`:
        the rows' fused features [n, d']."""

    @abstractmethod
    def growth(self, anchors: Sequence[TreeAnchor], levels: int) -> Growth:
        """Begin trees of at most this many levels."""

    def draft_logits(self, logits: Tensor) -> DraftLogits:
        """Return logits [n, f, outputs] as draft logits over the target's vocabulary, row by row."""
        found = draft_logits(logits.flatten(0, 1))
        heads = self.heads
        return found if heads.ids is None else MappedDraftLogits(found, heads.ids, heads.vocabulary)

    def tensor(self, numbers: Any) -> Tensor:
        """Return numbers as int64, on the heads' device."""
        return torch.as_tensor(numbers, dtype=torch.int64).to(self.heads.device)


class AutoregressiveReader(HeadsReader):
    """Heads that read their own guesses, with their memory."""

    def __init__(self, heads: AutoregressiveHeads, memory: TextMemory, *, context: int = CONTEXT) -> None:
        super().__init__(heads, memory, depth=AUTOREGRESSIVE_DEPTH, context=context, text_logits=BEAM * heads.outputs)
        self._heads = heads

    def keep(self, tokens: Sequence[int], positions: Sequence[int], fused: Tensor, slots: Slots) -> None:
        self._heads.read(self.tensor(tokens), fused, self.tensor(positions), slots, self.memory)

    def growth(self, anchors: Sequence[TreeAnchor], levels: int) -> Growth:
        seen = [anchor.rows[:-1] for anchor in anchors]  # the tree begins with the last row
        context = TreeContext(self.memory, seen, 1 + BEAM * (levels - 1))
        read = torch.stack([anchor.state for anchor in anchors])[:, None]
        # The row at a position holds the token after it.
        positions = self.tensor([[anchor.length - 2] for anchor in anchors])
        return AutoregressiveGrowth(self._heads, context, read, positions)


class AutoregressiveGrowth(Growth):
    """Trees grown level by level: the layer reads its own output for the previous level."""

    def __init__(self, heads: AutoregressiveHeads, context: TreeContext, read: Tensor, positions: Tensor) -> None:
        """`read` [n, 1, d'] and `positions` [n, 1]: fused features and positions of the rows before the last tokens."""
        self._heads = heads
        self._context = context
        self._carried = read  # g of the previous frontier, read by the next one
        self._positions = positions  # of the next frontier
        self._every = torch.arange(len(read), device=read.device)[:, None]

    def level(self, tokens: Tensor, origins: Tensor) -> Level:
        read = self._carried[self._every, origins]
        positions = self._positions.expand_as(origins)
        states = self._heads.grow(tokens, read, positions, self._context, origins)
        logits, self._carried = self._heads.outcome(states)
        self._positions = self._positions + 1
        return Level(logits)


class BlockReader(HeadsReader):
    """A block draft with its memory, where a row has the KV heads of all layers."""

    def __init__(self, draft: BlockDraft, memory: TextMemory, *, context: int = CONTEXT) -> None:
        text_logits = max(BEAM, draft.guesses) * draft.shape.outputs
        super().__init__(draft, memory, depth=draft.guesses, context=context, text_logits=text_logits)
        self._draft = draft

    def keep(self, tokens: Sequence[int], positions: Sequence[int], fused: Tensor, slots: Slots) -> None:
        self._draft.read(fused, self.tensor(positions), slots, self.memory)

    def growth(self, anchors: Sequence[TreeAnchor], levels: int) -> Growth:
        tokens = self.tensor([anchor.token for anchor in anchors])
        positions = self.tensor([anchor.length - 1 for anchor in anchors])
        states = self._draft.states(tokens, positions, [anchor.rows for anchor in anchors], self.memory)
        return BlockGrowth(self._draft, states[:, :levels])


class BlockGrowth(Growth):
    """Trees along the positions of a block. One pass gives the logits of all positions. Without a Markov head, all
    nodes of a level have the same guesses; with one, a node's guesses depend on its token."""

    def __init__(self, draft: BlockDraft, states: Tensor) -> None:
        """`states`: [n, levels, d']."""
        self._draft = draft
        self._states = states
        self._logits = draft.logits(states)
        self._level = 0
        self._memory: Tensor | None = None  # the Markov head's state for the previous frontier
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


def reader_of(heads: AutoregressiveHeads | BlockDraft, memory: TextMemory, trained: int = CONTEXT) -> HeadsReader:
    """Return the reader for heads of either kind. `trained`: number of positions that the heads are trained for."""
    context = min(CONTEXT, trained)
    if isinstance(heads, BlockDraft):
        return BlockReader(heads, memory, context=context)
    return AutoregressiveReader(heads, memory, context=context)


def draft_logits(logits: Tensor) -> DraftLogits:
    """Return float32 logits [n, V] as draft logits on the same device."""
    if logits.device.type == "cpu":
        return HostDraftLogits(logits.numpy())
    from specdec.engine.gpu.draft_logits import GpuDraftLogits  # imports modules for GPUs

    return GpuDraftLogits(logits)
