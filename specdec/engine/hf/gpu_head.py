"""An output head for GPUs: float32 logits from weights in their stored dtype."""

from __future__ import annotations

import torch
from torch import Tensor


class GpuHead(torch.nn.Module):
    """A `Float32Head` (`hf/linear.py`) without a float32 copy of the weights, which would take twice as long to read.

    A product of two bfloat16 numbers is exact in float32, and sums are float32 in both heads; only their order differs.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = head.in_features
        self.out_features = head.out_features
        self.weight = torch.nn.Parameter(head.weight.detach(), requires_grad=False)
        bias = None if head.bias is None else torch.nn.Parameter(head.bias.detach().float(), requires_grad=False)
        self.bias = bias

    def forward(self, hidden: Tensor) -> Tensor:
        flat = hidden.flatten(0, -2)
        if self.weight.dtype != torch.float32 and flat.device.type == "cuda":  # torch has this product on CUDA only
            logits = torch.mm(flat, self.weight.T, out_dtype=torch.float32)
        else:
            logits = flat.float() @ self.weight.float().T
        if self.bias is not None:
            logits = logits + self.bias
        return logits.view(*hidden.shape[:-1], self.out_features)
