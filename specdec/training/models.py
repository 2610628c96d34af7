"""Models as a training runs them: whole windows at a time, with transformers' attention."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from specdec.engine.hf.pretrained import DTYPES, load
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.training.training import activations


def load_target(directory: ModelDirectory, device: str) -> PreTrainedModel:
    """Load a target, whose weights do not change, in the dtype that suits the device."""
    return for_windows(load(directory, DTYPES[dtype_of(directory, Placement("eager", device=device))], device))


def load_draft(directory: ModelDirectory, device: str) -> PreTrainedModel:
    """Load a draft to be trained, in float32."""
    return for_windows(load(directory, torch.float32, device))


def for_windows(model: PreTrainedModel) -> PreTrainedModel:
    """Give a model the fastest attention that computes its logits correctly."""
    config = model.config.get_text_config()
    capped = getattr(config, "attn_logit_softcapping", None)  # torch's function does not support it
    model.set_attn_implementation("sdpa" if model._supports_sdpa and not capped else "eager")
    return model


def kept_for_gradients(model: PreTrainedModel, length: int) -> int:
    """Return how many float32 numbers a model keeps for the gradients of one window of `length` tokens."""
    config = model.config.get_text_config()
    layers, weights = config.num_hidden_layers, 0
    if config._attn_implementation == "eager":
        weights = layers * config.num_attention_heads * length**2
    return activations(length, config.hidden_size, layers, weights)
