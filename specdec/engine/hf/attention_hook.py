"""The hook by which a model's layers read a packed batch: transformers calls `attend` in place of its own attention.

Any causal language model of transformers whose attention goes through `AttentionInterface` runs in a packed batch with
this one function. How keys and values are stored and read depends on the batch's layout: `cpu/attention.py`,
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
    """The KV cache, and which keys each row sees, in one forward pass."""

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
        """Store the new keys and values [t, kv_heads, width]; return the output [t, heads, width] for query
        [t, heads, width], each row over the keys it sees."""


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

    The model's own layers call this. `attention_mask` is not used: the batch says which keys a row sees.
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
    """Prepare no mask: the batch says which keys a row sees."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)
