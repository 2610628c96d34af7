"""The attention hook of a model's layers for packed batches: transformers calls `attend` instead of its own attention.

With this one function, any causal language model of transformers whose attention goes through `AttentionInterface` can
run in a packed batch. The batch's layout determines how keys and values are stored and read: `cpu/attention.py`,
`padded/attention.py`, `gpu/attention.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "specdec"


class PackedAttention(Protocol):
    """The KV cache and the visible keys of each row, in one forward pass."""

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
        """Store the new keys and values [t, kv_heads, width]; return the output [t, heads, width] for query [t, heads,
        width], each row over its visible keys."""


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed: PackedAttention,
    scaling: float | None = None,
    softcap: float | None = None,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return the attention output [1, t, heads, width] for query [1, heads, t, width] and the new key and value.

    `attention_mask` is not used: the batch defines the keys that a row sees.
    """
    output = packed.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        softcap=softcap,
        window=sliding_window,
    )
    return output[None], None


def no_mask(*_args: Any, **_kwargs: Any) -> None:
    """Prepare no mask, because the batch defines the keys that a row sees."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)
