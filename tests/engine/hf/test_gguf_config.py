"""A GGUF file's configuration has what llama.cpp reads from the file, not transformers' defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFReader, GGUFWriter
from transformers import PretrainedConfig

from specdec.engine.hf.gguf_config import configuration
from specdec.engine.model_file import ModelDirectoryError

FIELDS: dict[str, Any] = {
    "block_count": 2,
    "context_length": 8192,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "rope.freq_base": 1e6,
}
"""Keys of every file here; heads are 16 wide unless a file says otherwise."""


def read(folder: Path, architecture: str, *, name: str = "", **fields: Any) -> PretrainedConfig:
    """Write a file without tensors and read its configuration. `name`: general.name. `fields`: keys with `__` for a
    dot; None leaves out."""
    file = folder / "one.gguf"
    writer = GGUFWriter(file, architecture)
    if name:
        writer.add_name(name)
    for name, value in (FIELDS | {key.replace("__", "."): value for key, value in fields.items()}).items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    writer.add_token_list(["a", "b", "c"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return configuration(folder, GGUFReader(file), file)


def test_a_window_that_the_file_lacks_is_not_invented(tmp_path: Path) -> None:
    """transformers takes a Llama file of this name for Mistral's, whose default is a window of 4096 tokens."""
    config = read(tmp_path, "llama", name="mistral")
    assert (config.model_type, config.sliding_window) == ("mistral", None)


@pytest.mark.parametrize(
    ("architecture", "layers", "hidden", "heads", "width", "scalar"),
    [
        ("gemma2", 26, 2304, 8, 256, 256),
        ("gemma2", 46, 4608, 32, 128, 144),
        ("gemma3", 48, 3840, 16, 256, 256),
        ("gemma3", 62, 5376, 32, 128, 168),
        ("gemma3", 2, 64, 4, 32, 32),
    ],
)
def test_the_scale_of_gemma_is_that_of_its_size(
    tmp_path: Path, architecture: str, layers: int, hidden: int, heads: int, width: int, scalar: int
) -> None:
    """Hidden size by heads in the models of 27B, else the width of a head: published values, but for the last."""
    config = read(
        tmp_path,
        architecture,
        block_count=layers,
        embedding_length=hidden,
        attention__head_count=heads,
        attention__key_length=width,
    )
    assert config.query_pre_attn_scalar == scalar


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("gemma2", {"attn_logit_softcapping": 20.0}, {"attn_logit_softcapping": 20}),
        ("gemma2", {"final_logit_softcapping": 0.0}, {"final_logit_softcapping": None}),
        ("gpt2", {}, {"n_positions": 8192, "n_inner": 96}),
        ("phi3", {"attention__sliding_window": 2047}, {"sliding_window": 2047}),
        ("phi3", {"attention__sliding_window": 0}, {"sliding_window": None}),
        ("phi3", {"context_length": 4096}, {"sliding_window": 2047}),
        ("phi3", {"context_length": 4096, "attention__sliding_window": 0}, {"sliding_window": None}),
        (
            "qwen2moe",
            {"expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 48},
            {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 48},
        ),
        ("qwen3", {"attention__key_length": 24}, {"head_dim": 24}),
        ("qwen3moe", {"expert_feed_forward_length": 32}, {"moe_intermediate_size": 32}),
        (
            "gemma3",
            {"block_count": 3, "attention__key_length": 16, "attention__sliding_window_pattern": 2},
            {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        ),
        (
            "gemma3",
            {"attention__key_length": 16, "attention__sliding_window_pattern": [False, True]},
            {"layer_types": ["full_attention", "sliding_attention"]},
        ),
    ],
)
def test_no_key_is_dropped(tmp_path: Path, architecture: str, fields: dict[str, Any], expected: dict[str, Any]) -> None:
    config = read(tmp_path, architecture, **fields)
    assert {name: getattr(config, name) for name in expected} == expected


YARN = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}


@pytest.mark.parametrize(
    ("architecture", "fields", "expected"),
    [
        ("starcoder2", {}, {"rope_theta": 1e6, "rope_type": "default"}),
        ("llama", {"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope__scaling__factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ("llama", {"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, {"rope_type": "default"}),
        ("llama", {"rope__scaling__type": "linear", "rope__scaling__factor": 1.0}, {"rope_type": "default"}),
        ("llama", YARN, {"rope_type": "yarn", "factor": 4.0}),
        ("llama", YARN | {"rope__scaling__yarn_beta_fast": 16.0}, {"beta_fast": 16.0}),
        ("llama", YARN | {"rope__scaling__attn_factor": 0.5}, {"attention_factor": pytest.approx(0.5693147)}),
        ("phi3", {"rope__dimension_count": 12}, {"partial_rotary_factor": 0.75}),
    ],
)
def test_rotary_embeddings_are_those_of_llama_cpp(
    tmp_path: Path, architecture: str, fields: dict[str, Any], expected: dict[str, Any]
) -> None:
    parameters = read(tmp_path, architecture, **fields).rope_parameters
    assert {name: parameters[name] for name in expected} == expected


def test_each_kind_of_layer_has_its_own_base(tmp_path: Path) -> None:
    config = read(
        tmp_path, "gemma3", attention__key_length=16, rope__freq_base_swa=2e4, rope__scaling__type="linear",
        rope__scaling__factor=8.0,
    )  # fmt: skip
    parameters = config.rope_parameters
    assert (parameters["full_attention"]["rope_theta"], parameters["full_attention"]["factor"]) == (1e6, 8)
    assert parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 2e4}


@pytest.mark.parametrize(
    ("architecture", "fields", "said"),
    [
        ("llama", {"rope__scaling__type": "longrope"}, "rope.scaling.type is 'longrope', must be linear or yarn"),
        ("llama", {"rope__scaling__type": "yarn"}, "rope.scaling.type is 'yarn', must be linear or yarn, with a"),
        ("llama", {"rope__scaling__attn_factor": 0.5}, "rope.scaling.attn_factor is 0.5, must be 1 with linear"),
        ("llama", YARN | {"rope__scaling__yarn_ext_factor": 0.5}, "yarn_ext_factor is 0.5, must be 1 with yarn"),
        ("qwen2", {"rope__dimension_count": 12}, "rope.dimension_count is 12, must be 16, the width of a head"),
    ],
)
def test_what_has_no_place_is_refused(tmp_path: Path, architecture: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ModelDirectoryError, match=said):
        read(tmp_path, architecture, **fields)
