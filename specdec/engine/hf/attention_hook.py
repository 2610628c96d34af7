"""Where a model's layers meet a packed batch: transformers calls `attend` in place of its own attention.

Any causal language model of transformers whose attention goes through `AttentionInterface` runs in a packed
batch with this one function. How keys and values are stored and read is the layout's: `path_attention.py`
or `lane_attention.py`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

NAME = "specdec"


class PackedAttention(Protocol):
    """Key/value memory and who sees what of it, in one forward pass."""

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
        """Store the new keys and values [t, kv_heads, width]; the output [t, heads, width] for query
        [t, heads, width], each row over what it may see."""


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
    """Attention output [1, t, heads, width] for query [1, heads, t, width] and the new key and value.

    Called by the model's own layers. `attention_mask` is not used: visibility is the batch's.
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
    """Visibility comes with the batch: the model has no mask to prepare."""


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, no_mask)
