"""Configuration of the model in a GGUF file, with the fields that transformers' reader drops.

transformers maps the keys of each architecture to fields by a table, and leaves out some that llama.cpp reads: their
fields would silently keep transformers' defaults. A value without a place in the configuration is refused.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

import gguf
import numpy as np
from numpy.typing import NDArray
from transformers import AutoConfig, PretrainedConfig

from specdec.engine.model_file import ModelDirectoryError

ROPE_FACTORS = "rope_freqs.weight"

LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""Scaling of rotary embeddings of all published Llama 3.1 to 3.3 models, except for its factor."""

DROPPED = {
    "gemma2": {
        "attn_logit_softcapping": "attn_logit_softcapping",
        "final_logit_softcapping": "final_logit_softcapping",
    },
    "gemma3": {"final_logit_softcapping": "final_logit_softcapping"},
    "gpt2": {"context_length": "n_positions", "feed_forward_length": "n_inner"},
    "phi3": {"attention.sliding_window": "sliding_window"},
    "qwen2moe": {
        "expert_feed_forward_length": "moe_intermediate_size",
        "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    },
    "qwen3": {"attention.key_length": "head_dim"},
    "qwen3moe": {"expert_feed_forward_length": "moe_intermediate_size"},
}
"""Architecture -> its keys that are missing from transformers' table, and their fields. A value of 0 becomes None."""

LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}
"""Numbers of layers of the Gemma models that scale queries by hidden size / heads instead of the head's width.
llama.cpp recognises them by this number too, since files do not contain the scale."""

PHI3_CONTEXT, PHI3_WINDOW = 4096, 2047
"""Context and sliding window of the Phi-3 models whose early files lack the window, as in llama.cpp."""

YARN_FIELDS = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
YARN_ONES = ("yarn_ext_factor", "yarn_attn_factor")
"""Keys of `rope.scaling` with a field in transformers' YaRN, and keys that transformers assumes to be 1."""


class GgufKeys(NamedTuple):
    """The keys of a file's own architecture."""

    reader: gguf.GGUFReader
    architecture: str

    @classmethod
    def of(cls, reader: gguf.GGUFReader) -> GgufKeys:
        return cls(reader, str(value_of(reader, "general.architecture")))

    def __call__(self, key: str) -> Any:
        """Return a key's value; None if the file lacks it."""
        return value_of(self.reader, f"{self.architecture}.{key}")


def value_of(reader: gguf.GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    return None if field is None else field.contents()


def configuration(folder: Path, reader: gguf.GGUFReader, file: Path) -> PretrainedConfig:
    """Return the configuration of a file's model. `folder` contains the file, or a link to it, and nothing else that
    transformers would read. Raises ModelDirectoryError for values without a place in the configuration."""
    config = AutoConfig.from_pretrained(folder, gguf_file=file.name, local_files_only=True, trust_remote_code=False)
    keys = GgufKeys.of(reader)
    for key, field in DROPPED.get(keys.architecture, {}).items():
        if (value := keys(key)) is not None:
            setattr(config, field, value or None)
    if keys.architecture in LAYERS_OF_27B:
        _set_gemma(config, keys)
    if (
        keys.architecture == "phi3"
        and keys("attention.sliding_window") is None
        and config.max_position_embeddings == PHI3_CONTEXT
    ):
        config.sliding_window = PHI3_WINDOW
    if config.model_type == "mistral" and keys("attention.sliding_window") is None:
        config.sliding_window = None  # transformers' default is 4096, also where it guesses Mistral from a file's name
    _set_rope(config, keys, file)
    return config


def _set_gemma(config: PretrainedConfig, keys: GgufKeys) -> None:
    """Set the scale of attention, and which layers of Gemma 3 have a sliding window: all but every n-th, or a list."""
    is_27b = config.num_hidden_layers == LAYERS_OF_27B[keys.architecture]
    config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if is_27b else config.head_dim
    pattern = keys("attention.sliding_window_pattern") if keys.architecture == "gemma3" else None
    if pattern is not None:
        every = range(1, config.num_hidden_layers + 1)
        windowed = pattern if isinstance(pattern, list) else [number % pattern != 0 for number in every]
        config.layer_types = ["sliding_attention" if has_window else "full_attention" for has_window in windowed]


def _set_rope(config: PretrainedConfig, keys: GgufKeys, file: Path) -> None:
    """Set base, width and scaling of the rotary embeddings. ModelDirectoryError for an unknown kind of scaling, since
    ignoring it would give other logits."""
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:  # GPT-2 has no rotary embeddings
        return
    local = parameters.get("sliding_attention")
    parameters = parameters.get("full_attention", parameters)  # Gemma 3 scales only its global layers
    if (theta := keys("rope.freq_base")) is not None:
        parameters["rope_theta"] = float(theta)
    if local is not None and (theta := keys("rope.freq_base_swa")) is not None:
        local["rope_theta"] = float(theta)
    _set_rotated_width(config, parameters, keys, file)
    factors = next((tensor.data for tensor in keys.reader.tensors if tensor.name == ROPE_FACTORS), None)
    scaling = _scaling(keys, file)
    if factors is not None and not (factors == 1).all():
        llama3 = LLAMA3 | {"factor": float(factors.max())}
        if scaling or not np.allclose(
            factors, _llama3_factors(llama3, parameters["rope_theta"], len(factors)), rtol=1e-3
        ):
            raise ModelDirectoryError(
                f"{file}: its rope_freqs.weight is not the scaling of Llama 3, the only one supported"
            )
        scaling = llama3
    parameters |= scaling


def _set_rotated_width(config: PretrainedConfig, parameters: dict[str, Any], keys: GgufKeys, file: Path) -> None:
    """Set the rotated share of a head. ModelDirectoryError if part of a head is rotated, but no field can say so."""
    rotated, width = keys("rope.dimension_count"), getattr(config, "head_dim", None)
    width = width or config.hidden_size // config.num_attention_heads
    if rotated in (None, width):
        return
    if "partial_rotary_factor" not in parameters:
        raise ModelDirectoryError(f"{file}: rope.dimension_count is {rotated}, must be {width}, the width of a head")
    parameters["partial_rotary_factor"] = rotated / width


def _scaling(keys: GgufKeys, file: Path) -> dict[str, Any]:
    """Return the scaling given by keys, as transformers' parameters; empty if there is none. As in llama.cpp, a factor
    without a type means linear scaling, the factor's older key is accepted, and type `none` ignores the factor."""
    kind = keys("rope.scaling.type") or "linear"
    factor = keys("rope.scaling.factor")
    factor = keys("rope.scale_linear") if factor is None else factor
    if kind not in ("none", "linear", "yarn") or (kind == "yarn" and not factor):
        raise ModelDirectoryError(f"{file}: rope.scaling.type is {kind!r}, must be linear or yarn, with a factor")
    for key in YARN_ONES if kind == "yarn" else ("attn_factor",):
        if (value := keys(f"rope.scaling.{key}")) not in (None, 1):
            raise ModelDirectoryError(f"{file}: rope.scaling.{key} is {value}, must be 1 with {kind}")
    if kind == "none" or factor in (None, 0, 1):
        return {}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": float(factor)}
    if (original := keys("rope.scaling.original_context_length")) is not None:
        scaling["original_max_position_embeddings"] = int(original)
    if kind == "yarn":
        scaling |= {
            field: float(value)
            for key, field in YARN_FIELDS.items()
            if (value := keys(f"rope.scaling.{key}")) is not None
        }
        if (attention := keys("rope.scaling.attn_factor")) not in (None, 1):
            scaling["attention_factor"] = attention * (1 + 0.1 * math.log(factor))
    return scaling


def _llama3_factors(scaling: dict[str, Any], theta: float, count: int) -> NDArray[np.float64]:
    """Return the factors [count] by which Llama 3.1 divides the frequencies of rotary embeddings (transformers'
    `_compute_llama3_parameters`)."""
    length, low, high = (
        scaling[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
    )
    wavelengths = 2 * np.pi * theta ** (np.arange(count) / count)
    smooth = np.clip((length / wavelengths - low) / (high - low), 0, 1)
    divided: NDArray[np.float64] = 1 / ((1 - smooth) / scaling["factor"] + smooth)
    return divided
