"""Decoder layers to train beside a target: the target's sizes, check and features, and random initial weights."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.heads.decoder_layer import Rotary
from specdec.engine.heads.layer_config import USUAL_EPSILON, USUAL_THETA, LayerSizes
from specdec.engine.hf.hidden_states import Features, decoder_layers
from specdec.engine.unsupported import UnsupportedModelError

SPREAD = 0.02
"""Standard deviation of random weights."""


def layer_sizes(model: PreTrainedModel) -> LayerSizes:
    """Return the target's layer sizes, for new layers beside it."""
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return LayerSizes(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        width=width + width % 2,  # rotary embeddings rotate pairs
        inner=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
    )


def check_features(model: PreTrainedModel, trains: str) -> None:
    """Raise UnsupportedModelError if a target's layers give no features, or its embeddings are not as wide as its
    layers. `trains`: the kind of heads, for the message."""
    decoder_layers(model)
    output: Any = model.get_output_embeddings()
    table: Any = model.get_input_embeddings()
    stream = model.config.get_text_config().hidden_size
    if {output.weight.shape[1], table.weight.shape[1]} != {stream}:
        raise UnsupportedModelError(
            f"{type(model).__name__}: has embeddings of {table.weight.shape[1]} and an output head of "
            f"{output.weight.shape[1]} columns, must have {stream}, as its layers, to train {trains}"
        )


def output_head(model: PreTrainedModel) -> Callable[[Tensor], Tensor]:
    """Return a target's output head in float32, with its bias if it has one, as a function from states to logits."""
    head: Any = model.get_output_embeddings()
    weight = head.weight.detach().float()
    bias = None if head.bias is None else head.bias.detach().float()
    return lambda states: F.linear(states, weight, bias)


def rotary_of(width: int, device: torch.device) -> Rotary:
    """Return rotary embeddings of attention heads of this width, with Llama's usual base."""
    return Rotary(USUAL_THETA ** (-torch.arange(0, width, 2, device=device).float() / width), 1.0)


def layer_fields(sizes: LayerSizes, *, layers: int, context: int, vocabulary: int) -> dict[str, object]:
    """Return the fields of config.json for layers of these sizes."""
    return {
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.inner,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.width,
        "num_hidden_layers": layers,
        "hidden_act": "silu",
        "rms_norm_eps": USUAL_EPSILON,
        "rope_theta": USUAL_THETA,
        "max_position_embeddings": context,
        "vocab_size": vocabulary,
    }


class Untrained:
    """Initial weights, float32: random matrices, and norms of ones. The same seed gives the same weights."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._random = torch.Generator().manual_seed(seed)
        self._device = device

    def product(self, rows: int, columns: int) -> Tensor:
        return (SPREAD * torch.randn(rows, columns, generator=self._random)).to(self._device)

    def fusion(self, hidden: int, features: int) -> Tensor:
        """Return weights [hidden, features * hidden] whose product with features is nearly the last one."""
        found = self.product(hidden, features * hidden)
        found[:, -hidden:] += torch.eye(hidden, device=self._device)
        return found

    def norm(self, *shape: int) -> Tensor:
        return torch.ones(shape, device=self._device)


def learned(weights: object, *targets: str) -> list[Tensor]:
    """Return all tensors in a dataclass of weights, in a fixed order, except the fields that are the target's."""

    def tensors(parts: Iterable[object]) -> Iterator[Tensor]:
        for part in parts:
            if isinstance(part, Tensor):
                yield part
            elif isinstance(part, list | tuple):
                yield from tensors(part)
            elif is_dataclass(part):
                yield from tensors(vars(part).values())

    return [*tensors(part for name, part in vars(weights).items() if name not in targets)]


@torch.no_grad()
def read_features(model: PreTrainedModel, tokens: Tensor, layers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return a target's features [rows * length, m, d] of these layers, and its logits [rows, length, V], both float32,
    for tokens [rows, length]."""
    kept = Features(layers)
    with kept.of(model):
        logits = model(tokens, use_cache=False).logits
    return kept.stacked().float(), logits.float()
