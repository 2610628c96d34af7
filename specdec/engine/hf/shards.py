"""Tensor parallelism: a model's layers split among ranks by transformers' plan (Shoeybi et al. 2019, section 3).

The plan splits the first of two products by its outputs and the second by its inputs. Between them a rank has its own
attention heads, or its own part of a gate; the results of the second product are summed over the ranks (all-reduce).

transformers splits the weights, and wraps each layer with what training needs. Here the parts become ordinary linear
layers, joined, prepacked and tiled like those of a whole model; only the sum is added.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from specdec.engine.distributed.ranks import Ranks
from specdec.engine.engine import UnsupportedModelError
from specdec.engine.hf.linear import Head

BY_OUTPUTS, BY_INPUTS = "colwise", "rowwise"
STYLES = {BY_OUTPUTS, BY_INPUTS, "replicated_with_grad_allreduce"}
"""The plan's styles supported within a layer. The last is for a per-head norm, replicated on every rank."""


def check_plan(name: str, config: Any, degree: int) -> None:
    """Raise UnsupportedModelError if a model of this configuration cannot be split into `degree` parts."""
    whole, config = config, config.get_text_config()  # a multimodal model has both, and either may specify it
    quantised = any(getattr(source, "quantization_config", None) is not None for source in (whole, config))
    plan: Mapping[str, str] | None = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise UnsupportedModelError(f"{name}: transformers has no tensor parallel plan for {config.model_type}")
    foreign = sorted(set(plan.values()) - STYLES)
    if foreign:
        raise UnsupportedModelError(
            f"{name}: the tensor parallel plan for {config.model_type} asks for {', '.join(foreign)}, "
            "which is not supported"
        )
    if quantised:
        raise UnsupportedModelError(f"{name}: quantised weights cannot be split")
    heads = config.num_attention_heads
    for kind, count in (("attention", heads), ("key/value", getattr(config, "num_key_value_heads", None) or heads)):
        if count % degree:
            raise UnsupportedModelError(f"{name}: {count} {kind} heads cannot be split evenly over {degree} processes")


class Summed(torch.nn.Module):
    """A linear layer split by its inputs: each rank multiplies its own, and the results are summed.

    With `in_order` the ranks' results are added in order of rank, in float32: then the bits of a sum depend on its
    terms only. A collective's order of addition may depend on an element's place in the tensor.
    """

    def __init__(self, linear: torch.nn.Linear, ranks: Ranks) -> None:
        super().__init__()
        self.linear = _own_part(linear, with_bias=False)
        self.bias = None if linear.bias is None else _local(linear.bias)
        self.in_order = False
        self._degree = ranks.degree

    def forward(self, x: Tensor) -> Tensor:
        part: Tensor = self.linear(x)
        if self.in_order:
            parts = [torch.empty_like(part) for _ in range(self._degree)]
            dist.all_gather(parts, part)
            total = parts[0].float()
            for other in parts[1:]:
                total = total + other
            part = total.to(part.dtype)
        else:
            dist.all_reduce(part)
        return part if self.bias is None else part + self.bias


class Gathered(torch.nn.Module):
    """An output head split by its outputs: each rank computes its own ids. Rank 0 gets the logits, the others none."""

    def __init__(self, head: torch.nn.Module, vocabulary: int, ranks: Ranks) -> None:
        super().__init__()
        self.head = head
        self._vocabulary = vocabulary
        self._rank, self._degree = ranks.rank, ranks.degree
        self._most = -(-vocabulary // ranks.degree)  # ids per rank; the last ranks may have fewer

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.head(hidden)
        if missing := self._most - logits.shape[-1]:
            logits = F.pad(logits, (0, missing))
        logits = logits.contiguous()
        if self._rank:
            dist.gather(logits, dst=0)
            return logits[..., :0]
        parts = [torch.empty_like(logits) for _ in range(self._degree)]
        dist.gather(logits, parts, dst=0)
        return torch.cat(parts, dim=-1)[..., : self._vocabulary]


def settle(model: PreTrainedModel, ranks: Ranks, float32_head: Head) -> None:
    """Turn the parts of a split model into ordinary linear layers, and its head into a float32 head.

    Token embeddings stay as split by transformers: one sum a step, with all terms but one zero.
    """
    head = model.get_output_embeddings()
    whole = head.out_features
    cut = isinstance(head.weight, DTensor)
    own_head = float32_head(_own_part(head) if cut else head)
    model.set_output_embeddings(Gathered(own_head, whole, ranks) if cut else own_head)
    plan = model.tp_plan
    for path, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear) and isinstance(child.weight, DTensor):
                style = plan[re.sub(r"\.\d+\.", ".*.", f"{path}.{name}")]
                setattr(module, name, Summed(child, ranks) if style == BY_INPUTS else _own_part(child))


def sum_in_order(model: torch.nn.Module, in_order: bool) -> None:
    """Set `in_order` for all sums of a model."""
    for module in model.modules():
        if isinstance(module, Summed):
            module.in_order = in_order


def _own_part(linear: torch.nn.Linear, *, with_bias: bool = True) -> torch.nn.Linear:
    """Return this rank's part of a linear layer as an independent layer."""
    weight = _local(linear.weight)
    own = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    own.weight = weight
    if with_bias and linear.bias is not None:
        own.bias = _local(linear.bias)
    return own


def _local(parameter: Tensor) -> torch.nn.Parameter:
    tensor = parameter.detach()
    return torch.nn.Parameter(tensor.to_local() if isinstance(tensor, DTensor) else tensor, requires_grad=False)
