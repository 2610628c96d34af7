"""Model shapes as configurations, and the roofline of a step: the minimum time of its memory reads.

    roofline = (weight bytes + key/value bytes) / bandwidth

Every weight is read once a step, except for the input embedding (a few rows); the keys and values of each session's
text are read once, however many of its tokens are in the step. Arithmetic is not included: with many rows a device is
compute-bound, and no engine comes near this roofline.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.engine.model_file import ModelDirectoryError


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, **other: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": inner,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    } | other


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _llama(64, 2, 4, 2, 96, head_dim=16, vocab_size=320),
    "60m": _llama(512, 8, 8, 4, 1536, head_dim=64, vocab_size=32000),
    "llama-3.2-1b": _llama(2048, 16, 32, 8, 8192, head_dim=64, tie_word_embeddings=True),
    "llama-3.1-8b": _llama(4096, 32, 32, 8, 14336),
}
"""Configurations by name."""


@dataclass(frozen=True)
class Sizes:
    """Bytes of a model in its compute dtype."""

    held: int  # all weights
    head: int  # weights of the output head, which engines may keep in float32
    read: int  # weights read by a step
    kv_token: int  # keys and values of one token, all layers


def write(shape: dict[str, Any], folder: Path) -> Path:
    """Write a directory with the configuration only; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(shape, indent=2) + "\n", encoding="utf-8")
    return folder


def sizes(folder: Path, item_bytes: int) -> Sizes:
    """Return the sizes, counted on a model without storage; ModelDirectoryError if the configuration is invalid."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except Exception as error:  # transformers raises errors of any kind
        reason = " ".join(str(error).split())
        raise ModelDirectoryError(f"{folder}: cannot be built as a model: {reason}") from error
    held = sum(parameter.numel() for parameter in model.parameters())
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    text = config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    kv_heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return Sizes(
        held=held * item_bytes,
        head=head.numel() * item_bytes,
        read=(held if head is embedding else held - embedding.numel()) * item_bytes,
        kv_token=2 * text.num_hidden_layers * kv_heads * width * item_bytes,
    )


@dataclass(frozen=True)
class Combination:
    """The size of one step: `tokens` new tokens in each of `sessions` texts of `context` tokens."""

    tokens: int
    context: int
    sessions: int

    @property
    def rows(self) -> int:
        return self.tokens * self.sessions

    @property
    def slots(self) -> int:
        """KV cache slots of the texts."""
        return self.sessions * (self.context + self.tokens)


def roofline_seconds(sizes: Sizes, what: Combination, bandwidth: float) -> float:
    """Return the roofline of a step in seconds; `bandwidth` is in bytes a second."""
    return (sizes.read + sizes.kv_token * what.context * what.sessions) / bandwidth


WORKING = 1 << 28
"""Bytes reserved for everything besides weights, keys, values and logits."""


def needed_bytes(sizes: Sizes, what: Combination, item_bytes: int, vocabulary: int) -> int:
    """Return the bytes needed by a step: weights (and the head in float32), keys and values, logits twice."""
    head = sizes.head * 4 // item_bytes
    return sizes.held + head + sizes.kv_token * what.slots + 8 * vocabulary * what.rows + WORKING


def split(
    sizes: Sizes, wanted: list[Combination], item_bytes: int, vocabulary: int, free: int
) -> tuple[list[Combination], list[str]]:
    """Return the combinations that fit into `free` bytes, and a line on each of the others."""
    fitting, left_out = [], []
    for what in wanted:
        needed = needed_bytes(sizes, what, item_bytes, vocabulary)
        if needed <= free:
            fitting.append(what)
        else:
            left_out.append(
                f"{what.sessions} sessions, {what.context} tokens of context, {what.tokens} tokens: left out, "
                f"{needed / 2**30:.1f} GiB needed and {free / 2**30:.1f} GiB free"
            )
    return fitting, left_out
