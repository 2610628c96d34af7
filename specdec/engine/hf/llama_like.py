"""Models of the Llama kind: recognising them, and joining their products. `cpu/decoder.py` and `gpu/decoder.py` run
them with few calls."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from specdec.engine.hf.linear import join
from specdec.engine.hf.pretrained import is_quantised

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""The `model_type`s whose layers are RMS norm, rotary attention, RMS norm and gated SiLU, without scaling or caps.

Widths, scales and windows come from the layers' own calls (`hf/pretrained.py`); the reference check at start verifies
that a layer does nothing else.
"""


MERGED = 3
"""Number by which `join_layer` reduces the products of a layer."""


def fits(model: PreTrainedModel) -> bool:
    """Return whether a model is of the Llama kind by its configuration, with weights that are not quantised."""
    config = model.config
    return config.model_type in KINDS and config.hidden_act in ("silu", "swish") and not is_quantised(model)


def join_products(model: PreTrainedModel) -> None:
    """Join the products that share an input, in each layer."""
    for layer in model.model.layers:
        join_layer(layer)


def join_layer(layer: Any) -> None:
    """Join the products of one layer that share an input: query, key and value; gate and up."""
    join(layer.self_attn, ("q_proj", "k_proj", "v_proj"))
    join(layer.mlp, ("gate_proj", "up_proj"))
