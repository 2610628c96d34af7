"""Tiny random models of many architectures, saved as directories that every part of specdec can load.

Their texts are nonsense, but not arbitrary: weights are large enough that logits differ, greedy text varies, and
every window, cap, bias and norm of an architecture affects the result. All share one byte-level tokenizer of
VOCABULARY tokens, so that any two can be paired as draft and target.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

VOCABULARY = 320
CONTEXT = 256
PAD, BEGIN, END = 0, 1, 2
WINDOW = 16
"""Sliding window, in tokens, of architectures with one."""

_SPECIAL = ("<pad>", "<s>", "</s>")
_CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": PAD,
    "bos_token_id": BEGIN,
    "eos_token_id": END,
    "tie_word_embeddings": False,
}
_DECODER: dict[str, Any] = _COMMON | {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
_GROUPED: dict[str, Any] = _DECODER | {"num_key_value_heads": 2, "intermediate_size": 96}
_ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]
_GEMMA: dict[str, Any] = _GROUPED | {
    "num_hidden_layers": len(_ALTERNATING),
    "layer_types": _ALTERNATING,
    "head_dim": 24,
    "query_pre_attn_scalar": 16,
    "sliding_window": WINDOW,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}


def _llama(**overrides: Any) -> PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_GROUPED | overrides))


def _qwen2(**overrides: Any) -> PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**_GROUPED | overrides))


def _qwen3(**overrides: Any) -> PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_GROUPED | {"head_dim": 24} | overrides))


def _mistral(**overrides: Any) -> PreTrainedModel:
    own = {"sliding_window": WINDOW}
    return transformers.MistralForCausalLM(transformers.MistralConfig(**_GROUPED | own | overrides))


def _gemma2(**overrides: Any) -> PreTrainedModel:
    own = {"attn_logit_softcapping": 4.0, "final_logit_softcapping": 8.0}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**_GEMMA | own | overrides))


def _gemma3(**overrides: Any) -> PreTrainedModel:
    return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**_GEMMA | overrides))


def _gpt2(**overrides: Any) -> PreTrainedModel:
    own = {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT, "initializer_range": 0.3}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**_COMMON | own | overrides))


def _opt(**overrides: Any) -> PreTrainedModel:
    own = {"ffn_dim": 96, "init_std": 0.3}
    return transformers.OPTForCausalLM(transformers.OPTConfig(**_DECODER | own | overrides))


ARCHITECTURES: dict[str, Callable[..., PreTrainedModel]] = {
    "llama": _llama,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
}
"""Architecture name to a function making the model; its keyword arguments override configuration fields."""


def make(name: str, directory: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Save a model of architecture `name` in `directory`, creating it if necessary, and return it.

    The weights are a pure function of name, seed and `overrides` (configuration fields).
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = ARCHITECTURES[name](**overrides)
        _unsettle(model)
    return save(model, directory)


def save(model: PreTrainedModel, directory: Path) -> Path:
    """Save any model in `directory`, with the shared tokenizer."""
    transformers_logging.disable_progress_bar()
    model.save_pretrained(directory)
    tokenizer().save(str(directory / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[PAD],
        "bos_token": _SPECIAL[BEGIN],
        "eos_token": _SPECIAL[END],
        "model_max_length": CONTEXT,
        "chat_template": _CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return directory


def tokenizer() -> Tokenizer:
    """Return a byte-level BPE of VOCABULARY tokens: special ones, the 256 bytes, then merges of common letters."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(first, second) for first in "Ġetaonis" for second in "etaonisr"][: VOCABULARY - 256 - len(_SPECIAL)]
    names = [*_SPECIAL, *alphabet, *(first + second for first, second in merges)]
    made = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(name, special=True) for name in _SPECIAL])
    return made


@torch.no_grad()
def _unsettle(model: PreTrainedModel) -> None:
    """Move biases and norms off their initial zeros and ones, which would hide an omitted bias or norm."""
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(0.2 * torch.randn_like(parameter))


def near(target: Path, directory: Path, *, noise: float, seed: int = 1) -> Path:
    """Save a draft that often agrees with `target`: the target's weights plus noise of `noise` times each tensor's
    deviation."""
    model = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32, local_files_only=True)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.numel() > 1 else parameter.abs()
            parameter.add_(noise * spread * torch.randn(parameter.shape, generator=generator))
    return save(model, directory)
