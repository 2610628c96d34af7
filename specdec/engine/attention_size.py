"""Sizes of a model's attention, by its configuration."""

from __future__ import annotations

from typing import NamedTuple

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import Fields, is_integer

MAX_SIZE = 1 << 20
"""Sanity limit on the numbers of layers and heads, and on widths."""


class AttentionSize(NamedTuple):
    """Sizes of attention; 0 if unknown from the configuration."""

    layers: int
    heads: int
    kv_heads: int
    width: int  # of keys and values

    @classmethod
    def of(cls, directory: ModelDirectory) -> AttentionSize:
        config = Fields(directory.path, directory.config)

        def size(*names: str) -> int:
            found = (config.content.get(name) for name in names)
            return next((value for value in found if is_integer(value, 1, MAX_SIZE)), 0)

        heads = size("num_attention_heads", "n_head")
        width = size("head_dim") or (size("hidden_size", "n_embd") // heads if heads else 0)
        if config.has("kv_lora_rank"):  # keys and values have other widths
            width = 0
        return cls(size("num_hidden_layers", "n_layer"), heads, size("num_key_value_heads") or heads, width)
