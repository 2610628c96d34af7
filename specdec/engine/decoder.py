"""A decoder of the Llama kind in few operators, as CPUs run it.

transformers' layers are some forty small operators each, which for the few rows of a decoding step take as long as
the matrix products. Here a layer is four products and five compiled loops. The weights stay the model's: what is one
product here is there a part of it (`linear.Part`). Models of any other kind keep their own layers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.engine.arithmetic import Array, array_of
from specdec.engine.decoder_loops import add_and_normalise, gate, rotate
from specdec.engine.invariance import TiledLinear
from specdec.engine.linear import join
from specdec.engine.path_attention import PathAttention
from specdec.engine.pretrained import LayerAttention
from specdec.engine.team import evenly

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose layers are: RMS norm, rotary attention, RMS norm, gated SiLU; nothing scaled, nothing capped.
Widths, scales and windows are what the layers ask for (`pretrained.attention_of`); that there is nothing else, the
engine's comparison at start makes sure of."""

FIRST_POSITIONS = 1024
"""Whose cosines and sines are computed at once."""

SHARED_FROM = 1 << 13
"""Numbers from which it pays to share a pass over them among threads: some ten microseconds' work."""


def fits(model: PreTrainedModel) -> bool:
    """Whether a model is of the kind, as far as its configuration tells."""
    config = model.config
    quantised = getattr(config, "quantization_config", None) is not None
    return config.model_type in KINDS and config.hidden_act in ("silu", "swish") and not quantised


def join_products(model: PreTrainedModel) -> None:
    """Make one product of those of a layer that share their input."""
    for layer in model.model.layers:
        join(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
        join(layer.mlp, ("gate_proj", "up_proj"))


@dataclass(frozen=True)
class _Layer:
    attends: LayerAttention
    attention_norm: Array  # [hidden]
    project: Any  # [t, hidden] -> [t, (heads + 2 * kv_heads) * width]
    head_norms: Array  # [2, width] or [0, width]
    project_back: Any
    mlp_norm: Array
    gate_and_up: Any  # [t, hidden] -> [t, 2 * inner]
    down: Any


class Decoder:
    """Runs a model's joined layers. Made anew when they have been replaced."""

    def __init__(self, model: PreTrainedModel, attends: list[LayerAttention]) -> None:
        config = model.config
        inside: Any = model.model
        self._dtype = model.dtype
        self._hidden = config.hidden_size
        # What there is of them here: a model may be in parts.
        self._heads = attends[0].kv_heads * (config.num_attention_heads // config.num_key_value_heads)
        gate_proj = inside.layers[0].mlp.gate_proj
        self._inner = gate_proj.outputs.stop - gate_proj.outputs.start
        heads = self._heads + 2 * attends[0].kv_heads
        self._widths = self._hidden, heads * attends[0].width, self._inner  # of norms, of heads, of gates
        self._epsilon = np.float32(config.rms_norm_eps)
        self._embed = inside.embed_tokens
        self._rotary = inside.rotary_emb
        self._norm = _weight(inside.norm)
        self._head = model.get_output_embeddings()
        self._cos = self._sin = np.empty((0, 0), np.float32)
        pairs = list(zip(inside.layers, attends, strict=True))
        # Rows that fit into one tile go round the tiling: its few lines, 33 times, are 5 % of a row's step.
        self._layers = [self._layer(*pair, tiled=False) for pair in pairs]
        self._tiled_layers = [self._layer(*pair, tiled=True) for pair in pairs]
        some = gate_proj.joined.linear
        self._rows_of_a_tile = some.rows.counts[-1] if isinstance(some, TiledLinear) else math.inf

    def _layer(self, layer: Any, attends: LayerAttention, *, tiled: bool) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp

        def product(linear: Any) -> Any:
            return linear.forward if tiled or not isinstance(linear, TiledLinear) else linear.linear.forward

        norms = [_weight(attention.q_norm), _weight(attention.k_norm)] if hasattr(attention, "q_norm") else []
        stored = _weight(layer.input_layernorm)
        return _Layer(
            attends=attends,
            attention_norm=stored,
            project=product(attention.q_proj.joined.linear),
            head_norms=np.stack(norms) if norms else np.empty((0, attends.width), stored.dtype),
            project_back=product(attention.o_proj),
            mlp_norm=_weight(layer.post_attention_layernorm),
            gate_and_up=product(mlp.gate_proj.joined.linear),
            down=product(mlp.down_proj),
        )

    def __call__(self, tokens: Tensor, positions: Tensor, wanted: Tensor, attention: PathAttention) -> Tensor:
        """Logits [n, vocabulary], float32, of the wanted rows."""
        batch = attention.batch
        rows = len(tokens)
        norm_cuts, head_cuts, gate_cuts = (
            evenly(rows, attention.threads, SHARED_FROM // each) for each in self._widths
        )
        self._know_angles(int(batch.positions.max()))
        # All layers have the same shapes, and one after the other the same memory.
        width = self._layers[0].attends.width
        query = np.empty((rows, self._heads, width), np.float32)
        residual = torch.zeros(rows, self._hidden, dtype=self._dtype)
        normal = torch.empty_like(residual)
        attended = torch.empty(rows, self._heads * width, dtype=self._dtype)
        gated = torch.empty(rows, self._inner, dtype=self._dtype)
        stream, normalised, let_through = array_of(residual), array_of(normal), array_of(gated)
        seen = array_of(attended).reshape(rows, self._heads, width)
        update = self._embed(tokens)
        layers = self._layers if rows <= self._rows_of_a_tile else self._tiled_layers
        for index, layer in enumerate(layers):
            add_and_normalise(stream, array_of(update), layer.attention_norm, self._epsilon, normalised, norm_cuts)
            projected = layer.project(normal)
            keys, values = attention.memory_of(index)
            rotate(
                array_of(projected),
                layer.head_norms,
                self._epsilon,
                self._cos,
                self._sin,
                batch.positions,
                batch.slots,
                query,
                keys,
                values,
                head_cuts,
            )
            attention.read(index, query, seen, scale=layer.attends.scale, softcap=None, window=layer.attends.window)
            update = layer.project_back(attended)
            add_and_normalise(stream, array_of(update), layer.mlp_norm, self._epsilon, normalised, norm_cuts)
            gate(array_of(layer.gate_and_up(normal)), let_through, gate_cuts)
            update = layer.down(gated)
        add_and_normalise(stream, array_of(update), self._norm, self._epsilon, normalised, norm_cuts)
        logits: Tensor = self._head(normal[wanted])
        return logits

    def _know_angles(self, last: int) -> None:
        """Cosines and sines of all positions up to the last, at least."""
        if last < len(self._cos):
            return
        positions = torch.arange(2 * last + FIRST_POSITIONS)[None]
        cos, sin = self._rotary(torch.empty(0, dtype=torch.float32), positions)
        half = cos.shape[-1] // 2  # the other half is the same
        self._cos, self._sin = cos[0, :, :half].numpy().copy(), sin[0, :, :half].numpy().copy()


def _weight(norm: Any) -> Array:
    return array_of(norm.weight.detach())
