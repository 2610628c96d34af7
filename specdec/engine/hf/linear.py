"""Linear layers for decode steps: joined if they share their input, and prepacked for few rows.

torch passes a plain weight to oneDNN in row-major order, and oneDNN reorders it in every call, which takes much of a
decode step over few rows. With prepacked weights, a step of 8 rows of the demo target takes about four fifths as long,
in float32 and bfloat16 (`docs/decisions/2026-11-21-packed-weights.md`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TypeGuard

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from specdec.engine.working_memory import MAX_SLICE_IDS

TYPICAL_ROWS = 8
"""Row count that the weight layout is optimised for; others work too."""


class PackedLinear(torch.nn.Module):
    """A linear layer with its weight prepacked for oneDNN; the same function as the original layer."""

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
    """An output head with float32 logits, independent of the model's dtype.

    Logits rounded to bfloat16 tie by the dozen, and ties would decide tokens.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        bias = None if head.bias is None else head.bias.detach().float()
        self.linear = _linear(head.weight.detach().float(), bias)

    @property
    def bias(self) -> torch.nn.Parameter | None:
        """The head's bias; some models hold a second reference to it."""
        return self.linear.bias

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.linear(hidden.float())
        return logits


class SlicedHead(torch.nn.Module):
    """A `Float32Head` of several products, each over a slice of the vocabulary.

    Weights are laid out, and row counts compared, one slice at a time, so that the memory for this does not grow with
    the vocabulary. A token's logit is the same sum as in a single product.
    """

    def __init__(self, head: torch.nn.Linear) -> None:
        super().__init__()
        self.in_features = head.in_features
        self.out_features = head.out_features
        bias = None if head.bias is None else head.bias.detach().float()
        self.bias = None if bias is None else torch.nn.Parameter(bias, requires_grad=False)  # some models access it
        count = -(-head.out_features // MAX_SLICE_IDS)
        bounds = [number * head.out_features // count for number in range(count + 1)]
        self._places = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self.slices = torch.nn.ModuleList(
            _linear(head.weight.detach()[place].float(), None if bias is None else bias[place])
            for place in self._places
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden.float()
        if len(self.slices) == 1:
            whole: Tensor = self.slices[0](hidden)
            return whole
        logits = hidden.new_empty(*hidden.shape[:-1], self.out_features)
        for part, place in zip(self.slices, self._places, strict=True):
            logits[..., place] = part(hidden)
        return logits


Head = Callable[[torch.nn.Linear], torch.nn.Module]
"""Makes a head with float32 logits from a model's own head."""


def _linear(weight: Tensor, bias: Tensor | None) -> torch.nn.Linear:
    """Return a linear layer with this weight, without copying it."""
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = torch.nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = torch.nn.Parameter(bias, requires_grad=False)
    return linear


class Joined(torch.nn.Module):
    """One product for several linear layers with the same input."""

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


class JoinedPart(torch.nn.Module):
    """One of the joined layers: the same function as before, but each call computes the whole joined product."""

    def __init__(self, joined: Joined, outputs: slice) -> None:
        super().__init__()
        self.joined = joined
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.joined(x)[..., self.outputs]
        return result


def join(module: torch.nn.Module, names: Sequence[str]) -> None:
    """Replace the linear layers with these names in a module by parts of one joined product, in this order."""
    layers = [getattr(module, name) for name in names]
    joined = Joined(layers)
    start = 0
    for name, layer in zip(names, layers, strict=True):
        setattr(module, name, JoinedPart(joined, slice(start, start + layer.out_features)))
        start += layer.out_features


def can_pack(dtype: torch.dtype) -> bool:
    """Return whether this CPU and this torch have prepacked products of this dtype."""
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def as_linear(layer: Conv1D) -> torch.nn.Linear:
    """Return GPT-2's transposed layer as an ordinary linear layer."""
    inputs, outputs = layer.weight.shape
    linear = torch.nn.Linear(inputs, outputs, device="meta")
    linear.weight = torch.nn.Parameter(layer.weight.detach().T.contiguous(), requires_grad=False)
    linear.bias = layer.bias
    return linear


def is_plain(layer: torch.nn.Module) -> TypeGuard[torch.nn.Linear]:
    """Return whether a layer is torch's own linear layer with plain numbers as weights. A quantised layer has its own
    class, its own class of weights, its own `forward`, or a pre-forward hook."""
    return (
        type(layer) is torch.nn.Linear
        and type(layer.weight) in (torch.nn.Parameter, torch.Tensor)
        and "forward" not in vars(layer)
        and not layer._forward_pre_hooks
    )


def lay_out(model: torch.nn.Module, make: Callable[[torch.nn.Linear], torch.nn.Module] | None = None) -> None:
    """Convert GPT-2's transposed layers in a model to `torch.nn.Linear`, then replace every linear layer that is not
    quantised by `make(layer)`, if given. The model can then run but not train.

    No reference to a replaced layer remains, so that its weights are freed before the next layer's are created.
    """
    for module in [module for module in model.modules() if next(module.children(), None) is not None]:
        for name in [name for name, _ in module.named_children()]:
            child = getattr(module, name)
            layer = as_linear(child) if isinstance(child, Conv1D) else child
            if is_plain(layer):
                setattr(module, name, layer if make is None else make(layer))
