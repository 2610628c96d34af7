"""Models as a training runs them: whole windows at a time, with transformers' attention."""

from __future__ import annotations

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.engine.hf.pretrained import DTYPES, load
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.dtype import dtype_of
from specdec.engine.unsupported import UnsupportedModelError
from specdec.training.training import activations

UNUSED_POSITIONS = 2
"""Rows that a table of positions may have beyond the context: OPT's begins at position 2."""


def load_target(directory: ModelDirectory, device: str) -> PreTrainedModel:
    """Load a target, whose weights do not change, in the dtype that suits the device."""
    return for_windows(load(directory, DTYPES[dtype_of(directory, Placement("eager", device=device))], device))


def load_draft(directory: ModelDirectory, device: str) -> PreTrainedModel:
    """Load a draft to be trained, in float32."""
    return for_windows(load(directory, torch.float32, device))


def check_positions(model: PreTrainedModel, directory: ModelDirectory, length: int) -> None:
    """Raise UnsupportedModelError if a model with random weights learns a vector for each position, as GPT-2 and OPT
    do, and windows of `length` tokens would leave some of them random."""
    context, tokens = directory.context, model.get_input_embeddings()
    for name, part in model.named_modules():
        is_positions = isinstance(part, nn.Embedding) and context <= part.num_embeddings <= context + UNUSED_POSITIONS
        if is_positions and part is not tokens and length < context:
            raise UnsupportedModelError(
                f"{directory.name}: {name} has a vector for each position, and --untrained would leave those beyond "
                f"--length {length} random: set --length {context}, or a shorter context in config.json"
            )


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
