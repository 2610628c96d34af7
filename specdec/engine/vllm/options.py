"""Options passed on to vLLM unchanged."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from specdec.engine.model_file import shown
from specdec.engine.unsupported import UnsupportedModelError

MAX_ROWS = 4096
MAX_SEQUENCES = 1024
"""Limits of one pass, by which vLLM sizes its buffers: rows, and sequences."""

MIN_SEQUENCES = 256
"""Minimum number of sequences in vLLM's buffers, because the verifier measures steps of this many texts."""

MAX_STEP_ROWS = 2048
"""Maximum of --step-rows. The roots of all sessions and their candidates may exceed it, up to MAX_ROWS."""

OWN = {
    "async_scheduling": "the verifier schedules steps",
    "block_size": "the verifier manages KV memory",
    "data_parallel_rank": "a verifier runs one replica: start several verifiers",
    "data_parallel_size": "a verifier runs one replica: start several verifiers",
    "decode_context_parallel_size": "the verifier manages KV memory",
    "device_ids": "use CUDA_VISIBLE_DEVICES",
    "disable_hybrid_kv_cache_manager": "the verifier manages KV memory",
    "distributed_executor_backend": "the parts of a model run in processes of this machine",
    "dtype": "use --dtype",
    "enable_dbo": "a step is one forward pass",
    "enable_eplb": "experts are not moved",
    "enable_lora": "requests cannot select adapters",
    "enable_prompt_embeds": "the verifier works with token ids",
    "enable_prefix_caching": "the verifier does prefix caching",
    "enforce_eager": "use --compile or --no-cuda-graphs",
    "kv_offloading_size": "the verifier manages KV memory",
    "kv_sharing_fast_prefill": "the verifier manages KV memory",
    "kv_transfer_config": "the verifier manages KV memory",
    "language_model_only": "models are text-only here",
    "load_format": "weights are read only from safetensors",
    "logits_processors": "the verifier samples tokens",
    "logprobs_mode": "the verifier samples tokens",
    "max_logprobs": "the verifier samples tokens",
    "max_model_len": "it is derived from the model and --kv-tokens",
    "max_num_batched_tokens": "use --step-rows",
    "max_num_seqs": "use --max-sessions",
    "model": "use --model",
    "nnodes": "a target runs on one machine here",
    "num_gpu_blocks_override": "use --kv-tokens",
    "override_generation_config": "sampling parameters come with requests",
    "pipeline_parallel_size": "a step is one forward pass",
    "prefill_context_parallel_size": "the verifier manages KV memory",
    "scheduling_policy": "the verifier schedules steps",
    "served_model_name": "use the orchestrator's --served-model-name",
    "skip_tokenizer_init": "the verifier works with token ids",
    "spec_method": "candidates come from specdec's drafts",
    "spec_model": "candidates come from specdec's drafts",
    "spec_tokens": "candidates come from specdec's drafts",
    "speculative_config": "candidates come from specdec's drafts",
    "trust_remote_code": "a model's own code is never run",
    "watermark_config": "the verifier samples tokens",
    "worker_extension_cls": "the engine installs its own",
}
"""vLLM options that users cannot set, with the reason or the option to use instead."""


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
    """Raise UnsupportedModelError, naming the option, for an option reserved for the engine, and for a
    tensor_parallel_size that the engine cannot compute with."""
    for name, why in OWN.items():
        if name in options:
            raise UnsupportedModelError(f"vLLM's option {name} cannot be set: {why}")
    parts = options.get("tensor_parallel_size", 1)
    if type(parts) is not int or parts < 1:
        raise UnsupportedModelError(
            f"vLLM's option tensor_parallel_size is {shown(parts)}, must be an integer of at least 1"
        )
