"""Attention over a packed batch, as transformers' attention interface calls it.

Any causal language model of transformers whose attention goes through `AttentionInterface` runs in a
packed batch with this one function: it writes the new keys and values into the pool and lets every
lane read its own. The same code runs eagerly and is traced for ONNX.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "specdec"


@dataclass
class Group:
    """`specdec.engine.batch.LaneGroup` as tensors; `keys` is a slice where a view will do."""

    keys: Tensor | slice
    rows: Tensor
    visible: Tensor
    windowed: Tensor | None


class Pools(Protocol):
    """Key and value memory of all layers, [slots, heads, width] each."""

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store rows; the layer's pools with them in place."""


@dataclass
class Packed:
    """What attention needs beside the queries, keys and values of the new tokens."""

    pools: Pools
    slots: Tensor
    groups: list[Group]
    place: Tensor | None  # None: the groups hold each token once, in order
    fused: bool  # scaled_dot_product_attention, or its parts (for tracing)


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: Packed,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention output [1, t, heads, width] for query [1, heads, t, width] and the new key and value.

    Called by the model's own layers. `attention_mask` is not used: visibility is the lanes'.
    """
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    pool_k, pool_v = packed.pools.write(layer, packed.slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
    queries = query[0].transpose(0, 1)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    outputs = []
    for group in packed.groups:
        visible = group.windowed if sliding_window is not None and group.windowed is not None else group.visible
        if isinstance(group.keys, slice):
            k, v = pool_k[group.keys][None], pool_v[group.keys][None]
        else:
            k, v = pool_k[group.keys], pool_v[group.keys]
        outputs.append(_lanes(queries[group.rows], k, v, visible, scale, softcap, packed.fused).flatten(0, 1))
    output = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    if packed.place is not None:
        output = output[packed.place]
    return output[None], None


def _lanes(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, softcap: float | None, fused: bool
) -> Tensor:
    """[g, r, heads, width] from query [g, r, heads, width], key and value [g, l, kv_heads, width].

    Grouped-query heads become further rows of their key head: nothing is repeated in memory.
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
        scores = (q @ k.transpose(-1, -2)).float() * scale
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        scores = torch.where(mask, scores, torch.finfo(torch.float32).min)
        out = torch.softmax(scores, dim=-1).to(v.dtype) @ v
    out = out.view(lanes, kv_heads, shared, rows, -1).permute(0, 3, 1, 2, 4)
    return out.reshape(lanes, rows, heads, -1)


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Visibility comes with the batch: the model has no mask to prepare."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)
