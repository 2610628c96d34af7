"""A GGUF file becomes the model directory it was made from, and anything else is refused in one line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader, GGUFWriter
from safetensors.torch import load_file

from specdec.engine.cache_folder import temporary
from specdec.engine.gguf_file import open_model
from specdec.engine.hf.gguf_conversion import convert
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from testing.gguf_model import convert as to_gguf
from testing.gguf_model import write_tokenizer
from tests.captured_logs import captured_logs
from tests.models import CONTEXT, END, VOCABULARY, make, save

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
YARN = {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path_factory.mktemp("models") / "own"))


@pytest.fixture(scope="module")
def file(model: ModelDirectory, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("files") / "own.gguf"
    to_gguf(model.path, file)
    return file


@pytest.fixture(scope="module")
def converted(file: Path, tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    target = tmp_path_factory.mktemp("converted") / "own"
    convert(file, target)
    return ModelDirectory(target)


def refused(file: Path, target: Path) -> str:
    with pytest.raises(ModelDirectoryError) as caught:
        convert(file, target)
    assert not target.exists()
    assert list(target.parent.glob("*.partial-*")) == []
    return str(caught.value)


def test_the_model_is_the_same(model: ModelDirectory, converted: ModelDirectory) -> None:
    assert converted.tokenizer_fingerprint == model.tokenizer_fingerprint
    assert converted.end_tokens == {END}
    assert converted.context == model.context
    assert converted.dtype == "float32"
    assert converted.quantisation is None
    ours, theirs = (load_file(directory.path / "model.safetensors") for directory in (model, converted))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_have_the_dtype_of_the_other_weights(tmp_path: Path, dtype: torch.dtype) -> None:
    model = transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_experts=4,
            num_experts_per_tok=2,
            norm_topk_prob=True,
            eos_token_id=END,
        )
    )
    layer = model.model.layers[0]
    up = layer.mlp.experts.gate_up_proj.detach().numpy()
    tensors = {"blk.0.ffn_gate_exps": up[:, :16], "blk.0.ffn_up_exps": up[:, 16:]}
    modules = {
        "token_embd": model.model.embed_tokens, "output_norm": model.model.norm, "output": model.lm_head,
        "blk.0.attn_norm": layer.input_layernorm, "blk.0.ffn_norm": layer.post_attention_layernorm,
        "blk.0.attn_q": layer.self_attn.q_proj, "blk.0.attn_k": layer.self_attn.k_proj,
        "blk.0.attn_v": layer.self_attn.v_proj, "blk.0.attn_output": layer.self_attn.o_proj,
        "blk.0.attn_q_norm": layer.self_attn.q_norm, "blk.0.attn_k_norm": layer.self_attn.k_norm,
        "blk.0.ffn_gate_inp": layer.mlp.gate,
    }  # fmt: skip
    tensors |= {name: module.weight.detach().numpy() for name, module in modules.items()}
    tensors["blk.0.ffn_down_exps"] = layer.mlp.experts.down_proj.detach().numpy()
    file = tmp_path / "experts.gguf"
    writer = GGUFWriter(file, "qwen3moe")
    writer.add_block_count(1)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(32)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(8)
    writer.add_expert_count(4)
    writer.add_expert_used_count(2)
    writer.add_expert_feed_forward_length(16)
    writer.add_layer_norm_rms_eps(1e-6)
    write_tokenizer(writer, save(model, tmp_path / "original"), {"eos_token_id": END})
    for name, values in tensors.items():
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(file, tmp_path / "out", str(dtype).removeprefix("torch."))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {dtype}
    converted = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    ours, theirs = model.state_dict(), converted.state_dict()
    assert all(torch.equal(ours[name].to(dtype), theirs[name]) for name in ours)


def test_an_earlier_conversion_is_replaced_and_nothing_else(
    file: Path, converted: ModelDirectory, tmp_path: Path
) -> None:
    convert(file, converted.path)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "one.txt").touch()
    with pytest.raises(ModelDirectoryError, match="contains something other than a converted GGUF file"):
        convert(file, tmp_path / "notes")


def test_quantised_weights_are_dequantised(model: ModelDirectory, tmp_path: Path) -> None:
    to_gguf(model.path, tmp_path / "small.gguf", "q8_0")
    convert(tmp_path / "small.gguf", tmp_path / "out")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    name = "model.layers.0.self_attn.q_proj.weight"
    exact = load_file(model.path / "model.safetensors")[name]
    step = exact.abs().max() / 127  # rounding step of the largest block
    assert 0 < (weights[name].float() - exact).abs().max() < step
    assert json.loads((tmp_path / "out" / "gguf.json").read_text())["types"].keys() == {"F32", "Q8_0"}


@pytest.mark.parametrize("rope", [LLAMA3, YARN], ids=lambda rope: str(rope["rope_type"]))
def test_the_scaling_of_rotary_embeddings_is_kept(tmp_path: Path, rope: dict[str, Any]) -> None:
    original = make("llama", tmp_path / "scaled", rope_parameters=rope, head_dim=32)
    to_gguf(original, tmp_path / "scaled.gguf")
    convert(tmp_path / "scaled.gguf", tmp_path / "out")
    assert ModelDirectory(tmp_path / "out").config["rope_parameters"] == rope


def test_an_unknown_scaling_is_refused(tmp_path: Path) -> None:
    original = make("llama", tmp_path / "scaled", rope_parameters=LLAMA3 | {"low_freq_factor": 2.0}, head_dim=32)
    to_gguf(original, tmp_path / "scaled.gguf")
    assert "rope_freqs.weight is not the scaling of Llama 3" in refused(tmp_path / "scaled.gguf", tmp_path / "out")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not a GGUF file"),
        (b"GGML" + bytes(60), "is not a GGUF file: it begins with b'GGML'"),
        (b"GGUF\x01\0\0\0" + bytes(60), "is GGUF version 1, must be version 2 or 3"),
        (b"GGUF\0\0\0\x03" + bytes(60), "is GGUF version 50331648"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "one.gguf").write_bytes(content)
    with pytest.raises(ModelDirectoryError, match=said):
        open_model(tmp_path / "one.gguf")


@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_a_truncated_file_is_refused_in_one_line(file: Path, tmp_path: Path, share: float) -> None:
    content = file.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(content[: int(share * len(content))])
    said = refused(tmp_path / "cut.gguf", tmp_path / "out")
    assert said.startswith(f"{tmp_path / 'cut.gguf'}: cannot be converted: ")
    assert "\n" not in said


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "part.gguf", "llama")
    writer.add_uint16("split.count", 3)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert "is one of 3 parts" in refused(tmp_path / "part.gguf", tmp_path / "out")


def test_a_file_is_converted_once(file: Path, model: ModelDirectory, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = open_model(file)
    written = (first.path / "model.safetensors").stat().st_mtime_ns
    assert first.name == "own"
    assert first.tokenizer_fingerprint == model.tokenizer_fingerprint
    second = open_model(file)
    assert second.path == first.path
    assert (second.path / "model.safetensors").stat().st_mtime_ns == written


def test_a_conversion_runs_no_files_of_the_working_directory(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "empty.gguf"
    file.write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "queue.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelDirectoryError, match="was not converted: exit status 2, see the line above"):
        open_model(file)
    assert not (tmp_path / "executed").exists()


@pytest.mark.verify
def test_a_conversion_by_command_leaves_stdin_to_the_script(file: Path, tmp_path: Path) -> None:
    """As in a loop that reads the names of files from its stdin."""
    convert = f"{sys.executable} -m specdec.cli import-gguf {file} {tmp_path / 'out'}"
    done = subprocess.run(f"{convert} && cat", shell=True, input="next\n", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'out'}\nnext\n"), done.stderr


@pytest.mark.verify
def test_a_cache_that_cannot_be_written_is_named_and_costs_time_only(
    file: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with captured_logs() as logs:
        found = open_model(file).path
        assert open_model(file).path == found
    assert found.is_relative_to(temporary())
    assert {entry["folder"] for entry in logs} == {str(tmp_path / "file" / "specdec")}


def test_a_failed_conversion_names_the_file(tmp_path: Path, monkeypatch: Any) -> None:
    """A stand-in for the converting process fails."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "python").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "python").chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(12))
    with pytest.raises(ModelDirectoryError, match=r"cut\.gguf: was not converted: exit status 2, see the line above"):
        open_model(tmp_path / "cut.gguf")


@pytest.mark.verify
def test_a_failed_conversion_says_why(tmp_path: Path, monkeypatch: Any, capfd: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF\x03\0\0\0" + bytes(12))
    with pytest.raises(ModelDirectoryError, match=r"cut\.gguf: was not converted: exit status 2, see the line above"):
        open_model(tmp_path / "cut.gguf")
    assert "cannot be converted" in capfd.readouterr().err


def test_files_beside_it_are_not_read(file: Path, converted: ModelDirectory, tmp_path: Path) -> None:
    """In a folder of several models, another model's tokenizer has nothing to do with this file."""
    (tmp_path / "own.gguf").write_bytes(file.read_bytes())
    other = json.loads((converted.path / "tokenizer.json").read_text())
    other["model"]["vocab"] = {"x": 0, "y": 1}
    other["model"]["merges"] = []
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "x"}')
    convert(tmp_path / "own.gguf", tmp_path / "out")
    assert ModelDirectory(tmp_path / "out").tokenizer_fingerprint == converted.tokenizer_fingerprint


def test_a_tensor_without_a_place_is_refused(tmp_path: Path) -> None:
    """Such as the factors of Phi 3's long rotary embeddings, without which the model's logits would differ."""
    original = make("llama", tmp_path / "model", attention_bias=False)
    to_gguf(original, tmp_path / "own.gguf", extra={"rope_factors_long.weight": np.ones(8, np.float32)})
    said = refused(tmp_path / "own.gguf", tmp_path / "out")
    assert said.endswith("rope_factors_long.weight has no place in transformers' LlamaForCausalLM")


@pytest.mark.verify
def test_an_edited_file_is_converted_again(file: Path, tmp_path: Path, monkeypatch: Any) -> None:
    """Tools change fields without changing the file's size, so its modification time counts."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    copy = tmp_path / "own.gguf"
    copy.write_bytes(file.read_bytes())
    first = open_model(copy).path
    os.utime(copy, ns=(1, 1))
    assert open_model(copy).path != first


def test_the_source_is_named(file: Path, converted: ModelDirectory) -> None:
    reader = GGUFReader(file)
    assert json.loads((converted.path / "gguf.json").read_text()) == {
        "file": "own.gguf",
        "types": {"F32": sum(int(tensor.n_elements) for tensor in reader.tensors)},
    }
