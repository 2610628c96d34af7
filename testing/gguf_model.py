"""Convert a Llama model directory to one GGUF file, the format of llama.cpp.

llama.cpp's own converter knows many architectures, and their tokenizers by name; it refuses a custom tokenizer. This
converter supports Llama with a byte-level BPE, which suffices for the demo pair. Weights keep their type unless another
is given.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, quants
from safetensors.torch import load_file
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

TYPES = {
    "float32": GGMLQuantizationType.F32,
    "float16": GGMLQuantizationType.F16,
    "bfloat16": GGMLQuantizationType.BF16,
    "q8_0": GGMLQuantizationType.Q8_0,
}
NAMES = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def convert(
    directory: Path, file: Path, dtype: str | None = None, extra: dict[str, np.ndarray[Any, Any]] | None = None
) -> None:
    """Write the GGUF file, with `extra` tensors by name; ValueError for a model of another kind."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    if config["model_type"] != "llama":
        raise ValueError(f"{directory}: is a {config['model_type']}, must be a llama")
    kind = TYPES[dtype or config["dtype"]]
    writer = GGUFWriter(file, "llama")
    heads, kept = config["num_attention_heads"], config["num_key_value_heads"]
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kept)
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    _scaling(writer, config)
    write_tokenizer(writer, directory, config)
    for name, weight in load_file(directory / "model.safetensors").items():
        module = name.removesuffix(".weight")
        values = weight.to(torch.float32).numpy()
        if module.endswith(("q_proj", "k_proj")):
            values = _interleaved(values, heads if module.endswith("q_proj") else kept)
        as_ = GGMLQuantizationType.F32 if values.ndim == 1 else kind  # llama.cpp requires norms in float32
        writer.add_tensor(f"{_name(module)}.weight", quants.quantize(values, as_), raw_dtype=as_)
    for name, values in (extra or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _name(module: str) -> str:
    if module in OUTSIDE:
        return OUTSIDE[module]
    _, _, layer, rest = module.split(".", 3)
    return f"blk.{layer}.{NAMES[rest]}"


def _interleaved(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Return the weight with each head's halves interleaved: llama.cpp rotates neighbours, transformers the halves."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def _scaling(writer: GGUFWriter, config: dict[str, Any]) -> None:
    """Write the scaling of the rotary embeddings; for Llama 3, write the divisors of their frequencies."""
    rope = config["rope_parameters"]
    if rope["rope_type"] == "llama3":
        plain = 1 / rope["rope_theta"] ** (np.arange(0, config["head_dim"], 2) / config["head_dim"])
        scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), "cpu")
        writer.add_tensor("rope_freqs.weight", (plain / scaled.numpy()).astype(np.float32))
    elif rope["rope_type"] != "default":
        writer.add_rope_scaling_type(RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if length := rope.get("original_max_position_embeddings"):
            writer.add_rope_scaling_orig_ctx_len(length)


def write_tokenizer(writer: GGUFWriter, directory: Path, config: dict[str, Any]) -> None:
    """Write the tokenizer of a model directory: a byte-level BPE."""
    said = json.loads((directory / "tokenizer.json").read_text(encoding="utf-8"))
    ids, special = said["model"]["vocab"], {token["content"]: token["id"] for token in said["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    tokens = sorted(ids | special, key=(ids | special).__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in special else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in said["model"]["merges"]])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
