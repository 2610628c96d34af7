"""Models of the Llama kind: which they are, and their products joined. Decoders for CPU and GPU run these in few
calls."""

from __future__ import annotations

from transformers import PreTrainedModel

from specdec.engine.hf.linear import join

KINDS = ("llama", "mistral", "qwen2", "qwen3")
"""`model_type`s whose layers are: RMS norm, rotary attention, RMS norm, gated SiLU; nothing scaled, nothing capped.
Widths, scales and windows are what the layers ask for (`pretrained.attention_of`); that there is nothing else, the
engine's comparison at start makes sure of."""


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
