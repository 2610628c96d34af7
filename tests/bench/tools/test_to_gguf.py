"""An exported GGUF file, read with the `gguf` package, equals the model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader
from safetensors.numpy import load_file

from bench.__main__ import main
from testing.gguf_model import convert
from tests.models import END, VOCABULARY, make

HEADS, KEPT = 4, 2  # query heads and key heads of the tiny models


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("models") / "own")


@pytest.fixture(scope="module")
def read(model: Path) -> GGUFReader:
    convert(model, model / "own.gguf")
    return GGUFReader(model / "own.gguf")


def test_every_weight_is_there_once(model: Path, read: GGUFReader) -> None:
    weights = load_file(model / "model.safetensors")
    assert len(read.tensors) == len(weights)
    by_name = {tensor.name: tensor.data for tensor in read.tensors}
    for theirs, ours in {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
        "blk.1.attn_norm.weight": "model.layers.1.input_layernorm.weight",
        "blk.1.ffn_norm.weight": "model.layers.1.post_attention_layernorm.weight",
        "blk.1.attn_v.weight": "model.layers.1.self_attn.v_proj.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
        "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
        "blk.1.ffn_up.weight": "model.layers.1.mlp.up_proj.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        np.testing.assert_array_equal(by_name[theirs], weights[ours])


@pytest.mark.parametrize(("theirs", "ours", "heads"), [("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KEPT)])
def test_what_is_rotated_together_stands_side_by_side(
    model: Path, read: GGUFReader, theirs: str, ours: str, heads: int
) -> None:
    """transformers rotates row i of a head together with row i + half, llama.cpp row 2 i with row 2 i + 1."""
    weight = load_file(model / "model.safetensors")[f"model.layers.0.self_attn.{ours}.weight"]
    (moved,) = (tensor.data for tensor in read.tensors if tensor.name == f"blk.0.{theirs}.weight")
    size = len(weight) // heads
    for head in range(heads):
        for pair in range(size // 2):
            np.testing.assert_array_equal(moved[head * size + 2 * pair], weight[head * size + pair])
            np.testing.assert_array_equal(moved[head * size + 2 * pair + 1], weight[head * size + pair + size // 2])


def test_the_tokenizer_keeps_its_ids(read: GGUFReader) -> None:
    tokens = read.get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == VOCABULARY
    assert tokens[END] == "</s>"
    assert read.get_field("tokenizer.ggml.eos_token_id").contents() == END


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a gpt2, must be a llama"):
        convert(make("gpt2", tmp_path / "other"), tmp_path / "other.gguf")


def test_the_command_writes_half_precision(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "half.gguf"
    main(["to-gguf", str(model), str(file), "--dtype", "float16"])
    types = {tensor.name: tensor.tensor_type.name for tensor in GGUFReader(file).tensors}
    assert types["blk.0.attn_q.weight"] == "F16"
    assert types["output_norm.weight"] == "F32"
