"""Block drafts: decoder layers that guess a block of tokens in one pass, from features of the target.

In DFlash (z-lab 2026, arXiv:2602.06036), f_t are the target's features at position t, e is the embedding of a token,
and a is the position of the text's last token:

    c_t = RMS(W_fc [f_t^(1); ...; f_t^(m)])          context, for each position t < a
    block = e(x_a), e(mask), ..., e(mask)            rows at positions a, a + 1, ...

In each layer, the block's rows attend to the context and to one another. The context's keys and values are the layer's
own projections of c_t, so they are computed once, when the target computes position t. If the first row guesses, too
(`from_anchor`), row k guesses x_(a + k + 1), otherwise x_(a + k).

DSpark (DeepSeek 2026, arXiv:2607.05147) adds a Markov head, which makes a guess depend on the token before it, and an
estimate c of the probability that a guess is accepted:

    logits += W_2 W_1[y],    c = sigmoid(w [h; W_1[y]] + b)          y: the token before the guess
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.heads.block_config import BlockShape, BlockVariant, Markov
from specdec.engine.heads.decoder_layer import Rotary, gated_mlp, in_heads, rms_norm
from specdec.engine.heads.fusion import Fusion
from specdec.engine.heads.text_memory import TextMemory
from specdec.engine.kv.slots import Slots


@dataclass(frozen=True)
class BlockLayer:
    """The weights of a layer, except its projections to keys and values."""

    norm: Tensor  # [d']
    query: Tensor  # [heads width, d']
    query_norm: Tensor  # [width]
    project_back: Tensor  # [d', heads width]
    mlp_norm: Tensor  # [d']
    gate_and_up: Tensor  # [2 inner, d']
    down: Tensor  # [d', inner]


@dataclass(frozen=True)
class MarkovWeights:
    """The weights of a Markov head."""

    embeddings: Tensor  # W_1 [V, r], by the token before the guess
    output: Tensor  # W_2 [outputs, r]
    joint: Tensor | None = None  # gated: [r, d' + r] for [h; W_1[y]]; rnn: [3 r, 2 r + d'] for [s; W_1[y]; h]
    joint_bias: Tensor | None = None


@dataclass(frozen=True)
class BlockWeights:
    """The weights of a block draft: on one device, and of one dtype, except for embeddings or an output head taken from
    the target."""

    fusion: Fusion  # with a norm after its product
    keys: Tensor  # [layers kv_heads width, d']
    values: Tensor  # [layers kv_heads width, d']
    key_norms: Tensor  # [layers, width]
    layers: Sequence[BlockLayer]
    last_norm: Tensor  # [d']
    embeddings: Tensor  # [ids, d'], its own or the target's
    output: Tensor | Callable[[Tensor], Tensor]  # [outputs, d'], or the target's function from states to logits
    markov: MarkovWeights | None = None
    confidence: tuple[Tensor, Tensor] | None = None  # weight [1, d'] or [1, d' + r], and bias [1]


class BlockDraft:
    """A block draft for a target of `vocabulary` tokens. `ids` [outputs]: token ids of the outputs; None: output number
    = id."""

    def __init__(
        self,
        shape: BlockShape,
        variant: BlockVariant,
        weights: BlockWeights,
        rotary: Rotary,
        *,
        vocabulary: int,
        ids: NDArray[np.int64] | None = None,
    ) -> None:
        self.shape = shape
        self.variant = variant
        self.vocabulary = vocabulary
        self.ids = ids
        self._weights = weights
        self._rotary = rotary

    @property
    def dtype(self) -> torch.dtype:
        return self._weights.fusion.product.dtype

    @property
    def device(self) -> torch.device:
        return self._weights.fusion.product.device

    @property
    def guesses(self) -> int:
        """The number of tokens that a block guesses."""
        return self.shape.rows if self.variant.from_anchor else self.shape.rows - 1

    def fused(self, features: Tensor) -> Tensor:
        """Return c [n, d'] of features [n, m, d] of any float dtype."""
        return self._weights.fusion(features)

    def context(self, fused: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of a context in all layers, [..., layers * kv_heads, width], from c [..., d']
        at these positions [...]."""
        shape, weights = self.shape, self._weights
        keys = in_heads(F.linear(fused, weights.keys), shape.width)
        norms = weights.key_norms.repeat_interleave(shape.kv_heads, dim=0)
        values = in_heads(F.linear(fused, weights.values), shape.width)
        return self._rotary.rotated(self._norm(keys, norms), positions), values

    def read(self, fused: Tensor, positions: Tensor, slots: Slots, memory: TextMemory) -> None:
        """Store the keys and values of n rows of any texts, in any order, given c [n, d'] and positions, int64 [n]:
        they depend on nothing else."""
        memory.write(slots, *self.context(fused, positions))

    def states(self, anchors: Tensor, positions: Tensor, texts: list[Slots], memory: TextMemory) -> Tensor:
        """Return h [n, guesses, d'] for the guesses after n texts, given their last tokens, int64 [n], and these
        tokens' positions [n]. `texts`: the slots of the texts' contexts."""
        length = max(map(len, texts))
        lengths = torch.tensor([len(slots) for slots in texts], device=self.device)
        seen = torch.arange(length, device=self.device) < lengths[:, None]
        visible = F.pad(seen, (0, self.shape.rows), value=True)[:, None, None]  # [n, 1, 1, length + rows]
        found = self.passed(*self.blocks(anchors, positions), *memory.gathered(texts, length), visible)
        return found[:, -self.guesses :]

    def blocks(self, anchors: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens and the positions of blocks, [..., rows], that begin with these tokens [...] at these
        positions [...]."""
        places = torch.arange(self.shape.rows, device=anchors.device)
        tokens = torch.where(places == 0, anchors[..., None], self.variant.mask)
        return tokens, positions[..., None] + places

    def passed(self, tokens: Tensor, positions: Tensor, keys: Tensor, values: Tensor, visible: Tensor) -> Tensor:
        """Pass r rows of n blocks, with tokens and positions [n, r], through all layers; return h [n, r, d'].
        `visible`, bool [n or 1, 1, r or 1, k + r], marks the keys that each row sees: the k keys of a context, with
        keys and values [n, k, layers * kv_heads, width], then the r rows' own."""
        shape, weights = self.shape, self._weights
        x = F.embedding(tokens, weights.embeddings).to(self.dtype)
        # For each layer: its part of the context [n, kv_heads, k, width], and its projections.
        of_context = (part.transpose(1, 2).chunk(shape.layers, dim=1) for part in (keys, values))
        projections = (part.chunk(shape.layers) for part in (weights.keys, weights.values))
        for layer, norm, *own in zip(weights.layers, weights.key_norms, *of_context, *projections, strict=True):
            of_layer_keys, of_layer_values, to_keys, to_values = own
            normal = self._norm(x, layer.norm)
            query = self._norm(in_heads(F.linear(normal, layer.query), shape.width), layer.query_norm)
            own_keys = self._norm(in_heads(F.linear(normal, to_keys), shape.width), norm)
            own_values = in_heads(F.linear(normal, to_values), shape.width)
            attended = F.scaled_dot_product_attention(
                self._rotary.rotated(query, positions).transpose(1, 2),
                torch.cat([of_layer_keys, self._rotary.rotated(own_keys, positions).transpose(1, 2)], dim=2),
                torch.cat([of_layer_values, own_values.transpose(1, 2)], dim=2),
                attn_mask=visible,
                scale=shape.width**-0.5,
                enable_gqa=shape.heads != shape.kv_heads,
            )
            x = x + F.linear(attended.transpose(1, 2).flatten(2), layer.project_back)
            x = x + gated_mlp(self._norm(x, layer.mlp_norm), layer.gate_and_up, layer.down)
        return self._norm(x, weights.last_norm)

    def logits(self, states: Tensor) -> Tensor:
        """Return the logits [..., outputs], float32, of h [..., d'], without the Markov head's part."""
        output = self._weights.output
        if isinstance(output, Tensor):
            return F.linear(states, output).float()
        return output(states.flatten(0, -2)).float().reshape(*states.shape[:-1], -1)

    def markov(self, tokens: Tensor, states: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the Markov head's part of the logits, float32 [n, f, outputs], and the state [n, f, r] of an `rnn`
        head after these tokens [n, f]. The guesses after the tokens have h [n, f, d']. `memory`: the state before the
        tokens; None at the first guess."""
        weights = self._weights.markov
        assert weights is not None
        before = F.embedding(tokens, weights.embeddings)
        if self.variant.markov is Markov.VANILLA:
            latent = before
        elif self.variant.markov is Markov.GATED:
            latent = self._joint(weights, states, before).sigmoid() * before
        else:
            memory = torch.zeros_like(before) if memory is None else memory
            gate, candidate, output = self._joint(weights, memory, before, states).chunk(3, dim=-1)
            gate = gate.sigmoid()
            memory, latent = gate * memory + (1 - gate) * candidate.tanh(), output.tanh()
        return F.linear(latent, weights.output).float(), memory

    def confidence(self, tokens: Tensor, states: Tensor) -> Tensor:
        """Return the estimated log-odds, float32 [n, f], of the acceptance of guesses with h [n, f, d'] after these
        tokens [n, f]."""
        assert self._weights.confidence is not None
        weight, bias = self._weights.confidence
        read = states
        if self.variant.confidence_reads_markov:
            assert self._weights.markov is not None
            read = torch.cat([states, F.embedding(tokens, self._weights.markov.embeddings)], dim=-1)
        return F.linear(read, weight, bias).float().squeeze(-1)

    @staticmethod
    def _joint(weights: MarkovWeights, *parts: Tensor) -> Tensor:
        assert weights.joint is not None
        return F.linear(torch.cat(parts, dim=-1), weights.joint, weights.joint_bias)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.variant.epsilon)
