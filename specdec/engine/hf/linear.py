"""Linear layers as a decoding step wants them: joined where they share their input, and laid out for few rows.

torch hands a weight to oneDNN row by row, and oneDNN rearranges it in every call; for the few rows of a
decoding step that is a good part of the time. Rearranged once, a step of 8 rows of the demo target takes
about four fifths of the time, in float32 and bfloat16 (`docs/decisions/2026-11-21-packed-weights.md`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

TYPICAL_ROWS = 8
"""The number of rows that the layout is chosen for; it holds for any."""


class PackedLinear(torch.nn.Module):
    """The same function as the layer it is made from."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.dtype = linear.weight.dtype
        self.bias = linear.bias
        self.weight = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), TYPICAL_ROWS)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return result


class Float32Head(torch.nn.Module):
    """An output head whose result is float32 whatever the model computes in.

    Logits rounded to bfloat16 tie by the dozen, and ties decide tokens.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(head.in_features, head.out_features, head.bias is not None, head.weight.device)
        self.linear.weight = torch.nn.Parameter(head.weight.detach().float(), requires_grad=False)
        if head.bias is not None:
            self.linear.bias = torch.nn.Parameter(head.bias.detach().float(), requires_grad=False)

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """Some models hold it a second time."""
        return self.linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden.float())
        return logits


class Joined(torch.nn.Module):
    """Linear layers that share their input, as one product."""

    def __init__(self, layers: list[torch.nn.Linear]) -> None:
        super().__init__()
        first = layers[0]
        outputs = sum(layer.out_features for layer in layers)
        self.linear = torch.nn.Linear(first.in_features, outputs, first.bias is not None, device="meta")
        weight = torch.cat([layer.weight.detach() for layer in layers])
        self.linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        if first.bias is not None:
            bias = torch.cat([layer.bias.detach() for layer in layers])
            self.linear.bias = torch.nn.Parameter(bias, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x)
        return result


class Part(torch.nn.Module):
    """One of the layers that were joined: the same function as before, at the price of all of them."""

    def __init__(self, joined: Joined, outputs: slice) -> None:
        super().__init__()
        self.joined = joined
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.joined(x)[..., self.outputs]
        return result


def join(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Make parts of one product of a module's linear layers of these names, in this order."""
    layers = [getattr(module, name) for name in names]
    joined = Joined(layers)
    start = 0
    for name, layer in zip(names, layers, strict=True):
        setattr(module, name, Part(joined, slice(start, start + layer.out_features)))
        start += layer.out_features


def can_pack(dtype: torch.dtype) -> bool:
    """Whether this CPU and this torch have the kernels."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def as_linear(layer: Conv1D) -> torch.nn.Linear:
    """GPT-2's transposed layer as the usual one."""
    inputs, outputs = layer.weight.shape
    linear = torch.nn.Linear(inputs, outputs, device="meta")
    linear.weight = torch.nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear


def is_plain(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Whether a layer is torch's own and its weights are numbers: quantised ones have a class of their own, or weights
    of one, or a function of their own put in place of the class's."""
    return (
        type(layer) is torch.nn.Linear
        and type(layer.weight) in (torch.nn.Parameter, torch.Tensor)
        and "forward" not in vars(layer)
        and not layer._forward_pre_hooks
    )


def lay_out(model: torch.nn.Module, *, packed: bool) -> None:
    """Make every linear layer of a model that will only be run a Linear, or a PackedLinear; leave quantised ones."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            layer = as_linear(child) if isinstance(child, Conv1D) else child
            if is_plain(layer):
                setattr(module, name, PackedLinear(layer) if packed else layer)
