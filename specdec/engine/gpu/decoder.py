"""A decoder of the Llama kind on a GPU, with few kernels: the counterpart of `cpu/decoder.py`.

A layer is four matrix products and six Triton kernels. The decoder uses the model's own weights, joined where products
share their input (`hf/llama_like.py`). A pass never synchronises with the GPU, and no shape depends on a tensor's
contents, so that it can be captured as a CUDA graph. Under Triton's interpreter the same code runs on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.gpu.attention import SplitKvAttention
from specdec.engine.gpu.kernels import add_and_normalise, gate, rotate
from specdec.engine.hf.hidden_states import Features
from specdec.engine.hf.pretrained import LayerAttention


@dataclass(frozen=True)
class _Layer:
    attends: LayerAttention
    attention_norm: Tensor  # [hidden]
    project: Any  # [t, hidden] -> [t, (heads + 2 * kv_heads) * width]
    head_norms: Tensor | None  # [2, width]
    project_back: Any
    mlp_norm: Tensor
    gate_and_up: Any  # [t, hidden] -> [t, 2 * inner]
    down: Any


class GpuDecoder:
    """A decoder that runs a model's joined layers, for texts of up to `context` tokens. `hf/llama_like.py` decides
    which models qualify. Create a new one after replacing layers."""

    def __init__(self, model: PreTrainedModel, attends: list[LayerAttention], context: int) -> None:
        config = model.config
        inside: Any = model.model
        self._heads = config.num_attention_heads
        self._inner = config.intermediate_size
        self._epsilon = float(config.rms_norm_eps)
        self._embed = inside.embed_tokens
        self._norm = inside.norm.weight.detach()
        self._layers = [_layer(*pair) for pair in zip(inside.layers, attends, strict=True)]
        self._cos, self._sin = _angles(inside.rotary_emb, context, model.device)

    def __call__(
        self, tokens: Tensor, positions: Tensor, attention: SplitKvAttention, features: Features | None = None
    ) -> Tensor:
        """Return the hidden states [t, hidden] of all rows, the input of the output head; fill `features`, if given.
        `positions` are the same as in the attention's batch."""
        update = self._embed(tokens)
        rows, width = len(tokens), self._layers[0].attends.width
        residual = torch.zeros_like(update)
        normal = torch.empty_like(update)
        # All layers have the same shapes and use the same memory in turn.
        query = update.new_empty(rows, self._heads, width)
        attended = torch.empty_like(query)
        gated = update.new_empty(rows, self._inner)
        for index, layer in enumerate(self._layers):
            add_and_normalise(residual, update, layer.attention_norm, self._epsilon, normal)
            if features is not None:
                features.keep(index, residual)
            rotate(
                layer.project(normal),
                layer.head_norms,
                self._epsilon,
                self._cos,
                self._sin,
                positions,
                attention.batch.slots,
                query,
                *attention.memory_of(index),
            )
            attention.read(index, query, attended, scale=layer.attends.scale, softcap=None, window=layer.attends.window)
            update = layer.project_back(attended.view(rows, -1))
            add_and_normalise(residual, update, layer.mlp_norm, self._epsilon, normal)
            gate(layer.gate_and_up(normal), gated)
            update = layer.down(gated)
        add_and_normalise(residual, update, self._norm, self._epsilon, normal)
        if features is not None:
            features.keep(len(self._layers), normal)
        return normal


def _layer(layer: Any, attends: LayerAttention) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    norms = [attention.q_norm.weight.detach(), attention.k_norm.weight.detach()] if hasattr(attention, "q_norm") else []
    return _Layer(
        attends=attends,
        attention_norm=layer.input_layernorm.weight.detach(),
        project=attention.q_proj.joined.linear,
        head_norms=torch.stack(norms) if norms else None,
        project_back=attention.o_proj,
        mlp_norm=layer.post_attention_layernorm.weight.detach(),
        gate_and_up=mlp.gate_proj.joined.linear,
        down=mlp.down_proj,
    )


def _angles(rotary: Any, context: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the cosines and sines of all positions, each float32 [context, width / 2]."""
    positions = torch.arange(context, device=device)[None]
    with torch.inference_mode():
        cos, sin = rotary(torch.empty(0, dtype=torch.float32, device=device), positions)
    half = cos.shape[-1] // 2  # both halves are equal
    return cos[0, :, :half].contiguous(), sin[0, :, :half].contiguous()
