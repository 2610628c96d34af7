"""Attention over a padded batch by tensor operations: on any device, and traceable for ONNX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass
class AttentionGroup:
    """A `PaddedGroup` (`padded/layout.py`) as tensors; `keys` is a slice if a view is enough."""

    keys: Tensor | slice
    rows: Tensor
    visible: Tensor
    windowed: Tensor | None


class KVTensors(Protocol):
    """Keys and values of all layers, each [slots, heads, width]."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store new keys and values at their slots; return the layer's updated keys and values."""


@dataclass
class PaddedAttention:
    """The attention of one forward pass, called by the model's layers."""

    pools: KVTensors
    slots: Tensor  # [t] destination of the new keys and values
    groups: list[AttentionGroup]
    place: Tensor | None  # [t] each token's row in the groups' output; None: the output has each token once, in order
    fused: bool  # use scaled_dot_product_attention, or else its component operations (for tracing)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scale: float,
        softcap: float | None,
        window: int | None,
    ) -> Tensor:
        pool_k, pool_v = self.pools.write(layer, self.slots, key, value)
        outputs = []
        for group in self.groups:
            visible = group.windowed if window is not None and group.windowed is not None else group.visible
            if isinstance(group.keys, slice):
                k, v = pool_k[group.keys][None], pool_v[group.keys][None]
            else:
                k, v = self._gather(pool_k, group.keys), self._gather(pool_v, group.keys)
            outputs.append(_lanes(query[group.rows], k, v, visible, scale, softcap, self.fused).flatten(0, 1))
        output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return output if self.place is None else output[self.place]

    def _gather(self, pool: Tensor, keys: Tensor) -> Tensor:
        """Return pool[keys]; by index_select, which copies several times as fast. A traced graph has one operator for
        both."""
        if not self.fused:
            return pool[keys]
        return pool.index_select(0, keys.flatten()).view(*keys.shape, *pool.shape[1:])


def _lanes(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float | None, fused: bool
) -> Tensor:
    """Return the attention [g, r, heads, width] of query [g, r, heads, width] over key and value [g, l, kv_heads,
    width].

    Query heads that share a key head become extra rows of that head, so that keys and values are not repeated in
    memory.
    """
    lanes, rows, heads, width = query.shape
    kv_heads = key.shape[2]
    shared = heads // kv_heads
    q = query.view(lanes, rows, kv_heads, shared, width).permute(0, 2, 3, 1, 4)
    q = q.reshape(lanes, kv_heads, shared * rows, width)
    k, v = key.transpose(1, 2), value.transpose(1, 2)
    mask = visible[:, None].repeat(1, 1, shared, 1) if shared > 1 else visible[:, None]
    if fused and softcap is None:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    else:
        scores = ((q * scale) @ k.transpose(-1, -2)).float()  # scaled before the product, since float16 ends at 65,504
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = torch.where(mask, scores, torch.finfo(torch.float32).min)
        out = torch.softmax(scores, dim=-1).to(v.dtype) @ v
    out = out.view(lanes, kv_heads, shared, rows, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(lanes, rows, heads, -1)
