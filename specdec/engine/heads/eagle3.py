"""EAGLE-3 heads: one decoder layer that continues a text from features at three depths of the target.

Li et al. 2025, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv:2503.01840). With f_t the features of the target at position t and e the embedding of a token:

    g_t = W_fc [f_t^(a); f_t^(b); f_t^(c)]                    the target's features, fused
    u_t = [RMS_in(e(x_(t+1))); RMS_hidden(g_t)]               the layer's input, projected to queries, keys and values
    s_t = r + MLP(RMS(r)),   r = g_t + Attention(u)_t         the layer's output
    logits of x_(t+2) = W_head RMS(s_t)

For a guess, the layer's own output replaces the features: g of a child is s of its parent. The row at position t holds
the token at t + 1: a row has the position of its features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.heads.decoder_layer import Rotary, gated_mlp, in_heads, rms_norm
from specdec.engine.heads.eagle3_config import Eagle3Shape, Eagle3Variant
from specdec.engine.heads.fusion import Fusion
from specdec.engine.heads.text_memory import TextMemory, TreeContext
from specdec.engine.kv.slots import Slots


@dataclass(frozen=True)
class Eagle3Weights:
    """The weights of EAGLE-3 heads, of one dtype on one device."""

    fusion: (
        Fusion  # with norms before its product: none, one (`norm_before_fc`), or one per feature (`fc_norm`, EAGLE-3.1)
    )
    embedding_norm: Tensor  # [d']
    hidden_norm: Tensor  # [d']
    project: Tensor  # [(heads + 2 kv_heads) width, 2 d']: queries, keys, values
    project_back: Tensor  # [d', heads width]
    mlp_norm: Tensor  # [d']
    gate_and_up: Tensor  # [2 inner, d']
    down: Tensor  # [d', inner]
    last_norm: Tensor  # [d']
    embeddings: Tensor  # [ids, d'], their own or the target's
    output: Tensor | Callable[[Tensor], Tensor]  # [outputs, d'], or the target's function from states to logits


class Eagle3Heads:
    """EAGLE-3 heads for a target of `vocabulary` tokens. `ids` [outputs]: token ids of the outputs; None: output number
    = id."""

    def __init__(
        self,
        shape: Eagle3Shape,
        variant: Eagle3Variant,
        weights: Eagle3Weights,
        rotary: Rotary,
        *,
        vocabulary: int,
        ids: NDArray[np.int64] | None = None,
    ) -> None:
        self.shape = shape
        self.outputs = shape.outputs
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

    def fused(self, features: Tensor) -> Tensor:
        """Return g [n, d'] of features [n, m, d] of any float dtype."""
        return self._weights.fusion(features)

    def inputs(self, tokens: Tensor, fused: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's inputs u [..., 2 d'] for tokens [...] and g [..., d'], and the residual [..., d'] added to
        its attention."""
        embedded = F.embedding(tokens, self._weights.embeddings).to(self.dtype)
        normal = self._norm(fused, self._weights.hidden_norm)
        u = torch.cat([self._norm(embedded, self._weights.embedding_norm), normal], dim=-1)
        return u, normal if self.variant.norm_before_residual else fused

    def projected(self, u: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the queries [..., heads, width], keys and values [..., kv_heads, width] of inputs at these positions
        [...]."""
        shape = self.shape
        whole = in_heads(F.linear(u, self._weights.project), shape.width)
        query, key, value = torch.split(whole, [shape.heads, shape.kv_heads, shape.kv_heads], dim=-2)
        return self._rotary.rotated(query, positions), self._rotary.rotated(key, positions), value

    def state(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Return s [..., d'] for a residual [..., d'] and the attention's output [..., heads * width]."""
        weights = self._weights
        state = residual + F.linear(attended, weights.project_back)
        return state + gated_mlp(self._norm(state, weights.mlp_norm), weights.gate_and_up, weights.down)

    def outcome(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits [..., outputs], float32, of s [..., d'], and the g [..., d'] that children read."""
        output = self._weights.output
        normal = self._norm(states, self._weights.last_norm)
        if isinstance(output, Tensor):
            logits = F.linear(normal, output).float()
        else:
            logits = output(normal.flatten(0, -2)).float().reshape(*normal.shape[:-1], -1)
        return logits, normal if self.variant.norm_output else states

    def read(self, tokens: Tensor, fused: Tensor, positions: Tensor, slots: Slots, memory: TextMemory) -> None:
        """Store the keys and values of n rows of any texts, in any order, given tokens and positions, int64 [n], and g
        [n, d']: in a single layer they depend on nothing else."""
        u, _ = self.inputs(tokens, fused)
        queries = self.shape.heads * self.shape.width
        keys, values = in_heads(F.linear(u, self._weights.project[queries:]), self.shape.width).chunk(2, dim=-2)
        memory.write(slots, self._rotary.rotated(keys, positions), values)

    def grow(self, tokens: Tensor, fused: Tensor, positions: Tensor, trees: TreeContext, origins: Tensor) -> Tensor:
        """Run the layer on a level of n trees, f rows each: tokens and positions [n, f], g [n, f, d']. `origins` [n,
        f]: the rows' parents in the previous level. Return s [n, f, d']."""
        shape = self.shape
        u, residual = self.inputs(tokens, fused)
        query, key, value = self.projected(u, positions)
        visible = trees.visible(origins)
        keys, values = trees.add(key, value)
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys.transpose(1, 2),
            values.transpose(1, 2),
            attn_mask=visible[:, None],
            scale=shape.width**-0.5,
            enable_gqa=shape.heads != shape.kv_heads,
        )
        return self.state(residual, attended.transpose(1, 2).flatten(2))

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, weight, self.variant.epsilon)
