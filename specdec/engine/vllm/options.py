"""Options passed on to vLLM unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.engine.unsupported import UnsupportedModelError

MOST_ROWS = 4096
MOST_SEQUENCES = 1024
"""Limits of one pass for vLLM's buffers: rows, and sequences."""

LEAST_SEQUENCES = 256
"""Minimum number of sequences in vLLM's buffers: the verifier measures steps of that many texts."""

MOST_STEP_ROWS = 2048
"""Limit on a step's rows when filled with prompts: the roots of all sessions and their candidates come on top."""

OWN = {
    "async_scheduling": "steps are ours",
    "block_size": "memory is ours",
    "data_parallel_rank": "each verifier has one model: start several",
    "data_parallel_size": "each verifier has one model: start several",
    "decode_context_parallel_size": "memory is ours",
    "device_ids": "say CUDA_VISIBLE_DEVICES",
    "disable_hybrid_kv_cache_manager": "memory is ours",
    "distributed_executor_backend": "processes of this machine run the parts of a model",
    "dtype": "say --dtype",
    "enable_dbo": "a step has one pass",
    "enable_eplb": "experts stay where they are",
    "enable_lora": "requests name no adapters",
    "enable_prompt_embeds": "texts are tokens here",
    "enable_prefix_caching": "prefixes are cached by the verifier",
    "enforce_eager": "say --compile or --no-cuda-graphs",
    "kv_offloading_size": "memory is ours",
    "kv_sharing_fast_prefill": "memory is ours",
    "kv_transfer_config": "memory is ours",
    "language_model_only": "models read text alone here",
    "load_format": "weights are read from safetensors alone",
    "logits_processors": "tokens are chosen by the verifier",
    "logprobs_mode": "tokens are chosen by the verifier",
    "max_logprobs": "tokens are chosen by the verifier",
    "max_model_len": "it follows from the model and --kv-tokens",
    "max_num_batched_tokens": "say --step-rows",
    "max_num_seqs": "say --max-sessions",
    "model": "say --model",
    "nnodes": "a target is on one machine here",
    "num_gpu_blocks_override": "say --kv-tokens",
    "override_generation_config": "requests say how tokens are chosen",
    "pipeline_parallel_size": "a step has one pass",
    "prefill_context_parallel_size": "memory is ours",
    "scheduling_policy": "steps are ours",
    "served_model_name": "say --served-model-name to the orchestrator",
    "skip_tokenizer_init": "texts are tokens here",
    "spec_method": "candidates come from drafts",
    "spec_model": "candidates come from drafts",
    "spec_tokens": "candidates come from drafts",
    "speculative_config": "candidates come from drafts",
    "trust_remote_code": "a model's own code is not run",
    "watermark_config": "tokens are chosen by the verifier",
    "worker_extension_cls": "it is ours",
}
"""vLLM options set by the engine itself, with the reason or the option to use instead."""


def read_options(text: str) -> dict[str, Any]:
    """Parse a JSON object of options; ValueError if it is not one."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f'must be a JSON object, such as {{"quantization": "fp8"}}, not {text[:60]}')
    return found


def check_options(options: Mapping[str, Any]) -> None:
    """Raise UnsupportedModelError for an option reserved to the engine, naming it."""
    for name, why in OWN.items():
        if name in options:
            raise UnsupportedModelError(f"vLLM's option {name} is not passed on: {why}")
