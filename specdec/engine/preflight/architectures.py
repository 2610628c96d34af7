"""Supported architectures: the causal language models of transformers 5.23, by `model_type`.

A small model of each, with random weights, was run in an engine. UNTRIED architectures could not be built in this way,
or their result depends on further fields of the configuration. Such models are loaded, and the checks at start decide.
"""

from __future__ import annotations

from typing import Any

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


TESTED = _names("gemma2 gemma3 gemma3_text gpt2 llama mistral opt qwen2 qwen3")
"""Tested with each change."""

RAN = _names(
    "afmoe apertus arcee aria_text beam bitnet cohere cohere2 cohere2_moe ctrl cwm diffllama ernie4_5 "
    "ernie4_5_moe exaone4 exaone_moe flex_olmo fuyu gemma gemma3n_text gemma4 gemma4_text gemma4_unified "
    "gemma4_unified_text glm glm4 glm4_moe got_ocr2 gpt-sw3 gpt_bigcode gpt_neox granite granitemoe "
    "granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax internlm3 iquestcoder jais2 jetmoe "
    "kolibri1 laguna mellum minimax_m2 minimax_m3_vl_text ministral ministral3 mixtral modernbert-decoder "
    "moss_transcribe_diarize nanochat olmo olmo2 olmo3 olmoe persimmon phi phi3 qwen2_moe qwen3_moe seed_oss "
    "smollm3 solar_open starcoder2 vaultgemma"
)
"""Run once in a packed batch, with random weights; the logits matched the model's own."""

UNTRIED = _names(
    "axk1 axk2 bert bert-generation camembert cohere_compass_text data2vec-text dbrx deepseek_v2 deepseek_v3 "
    "deepseek_v32 doge dots1 dots3_note dots3_note_text electra emu3 ernie gemma3n gemma4_assistant "
    "gemma4_unified_assistant glm4_moe_lite glm_moe_dsa gpt_neo hrm_text hy_v4 lfm2 lfm2_moe llama4 llama4_text "
    "longcat_flash mamba2 minicpm3 mllama moshi musicgen musicgen_melody nemotron phi4_multimodal phimoe roberta "
    "roberta-prelayernorm roc_bert xlm-roberta xlm-roberta-xl xmod youtu zamba2 zaya"
)

NO_INTERFACE = "it does not use transformers' attention interface"
STATE = "it has layers with state that is not in a KV cache"
SINKS = "its attention has sinks, which packed attention does not support"

REASONS = {
    NO_INTERFACE: "bailing_hybrid bamba bart big_bird bigbird_pegasus biogpt blenderbot blenderbot-small bloom blt "
    "codegen cpmant falcon falcon_h1 falcon_mamba git gpt_neox_japanese gptj inkling2_text inkling_text jamba "
    "kimi_linear mamba marian mbart megatron-bert mpt mvp nemotron_h olmo_hybrid openai-gpt pegasus plbart prophetnet "
    "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text reformer rembert roformer "
    "rwkv stablelm trocr whisper xglm xlm xlnet xlstm zamba",
    STATE: "granitemoehybrid lfm3 minimax recurrent_gemma",
    SINKS: "deepseek_v4 flint gpt_oss granite_swa granitemoe_swa mimo_v2_flash",
}

REFUSED = {name: reason for reason, names in REASONS.items() for name in names.split()}
"""`model_type` -> the reason why it cannot run in a packed batch."""


def check_architecture(directory: ModelDirectory) -> None:
    """Raise UnsupportedModelError, naming the architecture, for a model that cannot run in a packed batch."""
    name = directory.model_type
    if (reason := REFUSED.get(name)) is not None:
        raise UnsupportedModelError(f"{directory.path}: architecture {name} is not supported: {reason}")
    if name not in TESTED | RAN | UNTRIED:
        raise UnsupportedModelError(
            f"{directory.path}: architecture {name} (model_type in config.json) is not a causal language model of "
            "transformers 5.23"
        )
    check_layers(directory)


def check_layers(directory: ModelDirectory) -> None:
    """Raise UnsupportedModelError if the configuration requests layers that depend on the whole batch."""
    check_rope(directory, directory.config)
    if directory.config.get("attention_chunk_size"):
        raise UnsupportedModelError(f"{directory.name}: chunked attention is not supported")


def check_rope(directory: ModelDirectory, config: dict[str, Any]) -> None:
    """Raise UnsupportedModelError if rotary embeddings depend on the whole batch. `config` is the model's own
    configuration or transformers' version of it."""
    for rope_type in _rope_types(config):
        if rope_type in ("dynamic", "longrope", "su"):  # "su" is an older name
            raise UnsupportedModelError(
                f"{directory.name}: {rope_type} rotary embeddings depend on the longest text in a batch, so a "
                "session's tokens would depend on other sessions"
            )


def _rope_types(config: dict[str, Any]) -> list[str]:
    """Return the rotary types of all layers; newer configurations nest the parameters by kind of layer."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return [str(p.get("rope_type", p.get("type", "default"))) for p in nested or [parameters]]
