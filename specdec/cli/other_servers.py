"""Options of vLLM's and llama.cpp's servers that `specdec up` and `specdec serve` lack, and what replaces them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

DRAFTS = "--draft DIR or --local-draft DIR for a model, --verifier-heads DIR for heads, --speculation for neither"
DRAFT_SIZE = "--draft-depth, and --draft-max-nodes for trees"
CACHE = "the size of the KV cache is --kv-tokens"
CONTEXT = "a text is as long as the model's context, or --kv-tokens if that is less"
ALWAYS_ON = "it is always on"
FROM_TEMPLATE = "not needed: the chat template shows it"
TLS = "--openai-tls-cert FILE and --openai-tls-key FILE"
SEVERAL_GPUS = "--verifier-engine vllm --verifier-vllm-options '{\"tensor_parallel_size\": N}'"
DEVICE = "--device cuda computes on a GPU"
QUANTISED = "quantised checkpoints are recognised; --verifier-weights int8 or int4 quantises at start, on CPUs"

INSTEAD: Mapping[str, str] = MappingProxyType(
    {
        "--allowed-origins": "--openai-allow-origin ORIGIN, which may be repeated",
        "--api-key": "keys are in a file of tenants: --orchestrator-tenants FILE",
        "--ssl-certfile": TLS,
        "--ssl-keyfile": TLS,
        "--quantization": QUANTISED,
        "-q": QUANTISED,
        "--max-model-len": CONTEXT,
        "--max-num-seqs": "--verifier-max-sessions",
        "--max-num-batched-tokens": "--verifier-step-rows",
        "--gpu-memory-utilization": CACHE,
        "--enable-prefix-caching": ALWAYS_ON,
        "--enable-chunked-prefill": ALWAYS_ON,
        "--scheduling-policy": "requests always have priorities",
        "--enforce-eager": "--verifier-no-cuda-graphs",
        "--speculative-config": DRAFTS,
        "--speculative-model": DRAFTS,
        "--num-speculative-tokens": DRAFT_SIZE,
        "--tool-call-parser": FROM_TEMPLATE,
        "--enable-auto-tool-choice": FROM_TEMPLATE,
        "--reasoning-parser": FROM_TEMPLATE,
        "--generation-config": "the model's own; a request can ignore it: specdec.ignore_generation_config",
        "--seed": "each request has its own seed",
        "--tensor-parallel-size": SEVERAL_GPUS,
        "-tp": SEVERAL_GPUS,
        "--enable-lora": "not supported: serve a model with the adapter merged",
        "--trust-remote-code": "not supported: no code of a model is run",
        # llama.cpp's
        "--ctx-size": CONTEXT,
        "-c": CONTEXT,
        "--parallel": "--verifier-max-sessions",
        "-np": "--verifier-max-sessions",
        "--n-gpu-layers": DEVICE,
        "-ngl": DEVICE,
        "--model-draft": DRAFTS,
        "-md": DRAFTS,
        "--draft-max": DRAFT_SIZE,
        "--spec-type": DRAFTS,
        "-m": "--target DIR or FILE",
        "--hf-repo": "give a directory or a GGUF file: specdec downloads nothing",
        "-hf": "give a directory or a GGUF file: specdec downloads nothing",
    }
)
"""Option -> what to do instead, as the end of a message."""


def other_option(arguments: Iterable[str]) -> str | None:
    """Return the first argument of a command that is an option of another server only. As in vLLM, `_` equals `-`."""
    names = (argument.partition("=")[0] for argument in arguments if argument.startswith("-"))
    return next((name for name in names if name.replace("_", "-") in INSTEAD), None)
