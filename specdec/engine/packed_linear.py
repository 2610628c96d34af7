"""Linear layers whose weights lie as the CPU's matrix kernels want them.

torch hands a weight to oneDNN row by row, and oneDNN rearranges it in every call; for the few rows of a
decoding step that is a good part of the time. Rearranged once, a step of 8 rows of the demo target takes
about four fifths of the time, in float32 and bfloat16 (`docs/decisions/2026-11-21-packed-weights.md`).
"""

from __future__ import annotations

import torch
from torch import Tensor

TYPICAL_ROWS = 8
"""The number of rows that the layout is chosen for; it holds for any."""


class PackedLinear(torch.nn.Module):
    """The same function as the layer it is made from."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.bias = linear.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), TYPICAL_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return result


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch have the kernels."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def pack(model: torch.nn.Module) -> None:
    """Replace every linear layer of a model that will only be run."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if type(child) is torch.nn.Linear:
                setattr(module, name, PackedLinear(child))
