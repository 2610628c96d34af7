"""Unsupported and broken models are refused on loading, by the right exception, with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import onnx
import pytest
import safetensors.torch
import torch
import transformers

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.model_directory import COPY_GRAPH, DESCRIPTION, GRAPH, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import copy_graph, export
from specdec.engine.unsupported import UnsupportedModelError
from tests.captured_logs import captured_logs
from tests.models import END, VOCABULARY, make, save

pytestmark = pytest.mark.usefixtures("one_thread")

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": END,
}
"""A configuration for most architectures missing in `tests.models`."""


class TestRefusals:
    """Unsupported models are refused on loading, and the message names the reason."""

    @pytest.fixture
    def llama(self, tmp_path: Path) -> Path:
        return make("llama", tmp_path / "llama")

    @staticmethod
    def load(directory: Path) -> CpuEngine:
        return CpuEngine(ModelDirectory(directory), capacity=64)

    def test_a_state_space_model(self, tmp_path: Path) -> None:
        shape = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
        save(transformers.MambaForCausalLM(transformers.MambaConfig(**shape)), tmp_path)
        with pytest.raises(ModelDirectoryError, match="neither max_position_embeddings nor n_positions"):
            self.load(tmp_path)
        config = transformers.MambaConfig(**shape, max_position_embeddings=256)
        save(transformers.MambaForCausalLM(config), tmp_path)
        with pytest.raises(UnsupportedModelError, match="MambaForCausalLM does not use transformers' attention"):
            self.load(tmp_path)
        with pytest.raises(UnsupportedModelError, match="MambaForCausalLM"):
            export(ModelDirectory(tmp_path), tmp_path / "exported" / "mamba")
        assert not (tmp_path / "exported").exists()

    def test_a_hybrid_with_convolutions(self, tmp_path: Path) -> None:
        config = transformers.Lfm2Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            layer_types=["conv", "full_attention", "conv"],
        )
        save(transformers.Lfm2ForCausalLM(config), tmp_path)
        with pytest.raises(UnsupportedModelError, match="3 layers, but attention ran in 1 of them"):
            self.load(tmp_path)

    def test_attention_with_sinks(self, tmp_path: Path) -> None:
        """Sinks are an additional term in the softmax, which packed attention does not support."""
        config = transformers.GptOssConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=2,
            num_experts_per_tok=1,
        )
        save(transformers.GptOssForCausalLM(config), tmp_path)
        with pytest.raises(UnsupportedModelError, match="GptOssForCausalLM"):
            self.load(tmp_path)

    def test_a_model_with_an_attention_of_its_own(self, tmp_path: Path) -> None:
        """The model has a class for each attention implementation, but none for ours."""
        config = transformers.FalconConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, alibi=True
        )
        save(transformers.FalconForCausalLM(config), tmp_path)
        with pytest.raises(UnsupportedModelError, match="FalconForCausalLM does not use transformers' attention"):
            self.load(tmp_path)

    @pytest.mark.parametrize(
        "config",
        [
            transformers.Llama4TextConfig(**SMALL, attention_chunk_size=64, intermediate_size_mlp=48),
            transformers.Llama4TextConfig(**SMALL, floor_scale=64, no_rope_layers=[1, 0], intermediate_size_mlp=48),
            transformers.Qwen2MoeConfig(**SMALL, use_sliding_window=True, sliding_window=64, max_window_layers=2),
        ],
        ids=["in-chunks", "scaled-by-index", "windowed-by-mask-alone"],
    )
    def test_attention_that_differs_only_in_long_texts(
        self, config: transformers.PreTrainedConfig, tmp_path: Path
    ) -> None:
        """In short texts, packed attention agrees with the model's own: real models differ only after thousands of
        tokens."""
        save(transformers.AutoModelForCausalLM.from_config(config), tmp_path)
        with pytest.raises(UnsupportedModelError):
            self.load(tmp_path)

    def test_attention_that_is_not_causal(self, tmp_path: Path) -> None:
        directory = make("gemma3", tmp_path, use_bidirectional_attention=True)
        with pytest.raises(UnsupportedModelError, match="packed logits differ from the model's own by"):
            self.load(directory)

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_rotary_embeddings_that_depend_on_the_batch(self, llama: Path, kind: str) -> None:
        edit(llama / "config.json", rope_parameters={"rope_type": kind, "factor": 2.0, "rope_theta": 10000.0})
        with pytest.raises(UnsupportedModelError, match=f"llama: {kind} rotary embeddings depend on"):
            self.load(llama)

    def test_such_embeddings_by_another_name(self, tmp_path: Path) -> None:
        """transformers treats "yarn" of Phi-3 as longrope."""
        size = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        factors = [1.0] * 8
        rope = {"rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": factors, "long_factor": factors}
        config = transformers.Phi3Config(
            vocab_size=VOCABULARY,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=END,
            original_max_position_embeddings=64,
            rope_parameters=rope,
            **size,
        )
        directory = save(transformers.Phi3ForCausalLM(config), tmp_path)
        edit(directory / "config.json", rope_parameters=rope | {"rope_type": "yarn"})
        with pytest.raises(UnsupportedModelError, match="longrope rotary embeddings depend on"):
            self.load(directory)

    def test_tensors_that_nothing_uses_are_told(self, llama: Path) -> None:
        """Such as biases that are not in config.json."""
        file = llama / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        name = "model.layers.0.self_attn.q_proj"
        safetensors.torch.save_file(tensors | {f"{name}.bias": torch.zeros(len(tensors[f"{name}.weight"]))}, file)
        with captured_logs() as logged:
            CpuEngine(ModelDirectory(llama), capacity=64, exact=False)
        (told,) = [each for each in logged if each["event"] == "tensors_not_used"]
        assert told["one"] == f"{name}.bias"

    def test_such_embeddings_in_one_kind_of_layer(self, tmp_path: Path) -> None:
        """Gemma 3 has parameters for each kind of layer."""
        kinds = {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
        }
        directory = make("gemma3", tmp_path, rope_parameters=kinds)
        with pytest.raises(UnsupportedModelError, match="dynamic rotary embeddings depend on"):
            self.load(directory)

    def test_a_head_whose_bias_the_model_holds_as_well(self, tmp_path: Path) -> None:
        """The engine runs it: the check at start compares logits with the model's own forward pass."""
        size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
        config = transformers.BertConfig(vocab_size=VOCABULARY, is_decoder=True, **size)
        directory = save(transformers.BertLMHeadModel(config), tmp_path)
        CpuEngine(ModelDirectory(directory), capacity=64, exact=False)

    def test_float16_on_the_cpu(self, llama: Path) -> None:
        with pytest.raises(UnsupportedModelError, match="float16 is for GPUs"):
            CpuEngine(ModelDirectory(llama), capacity=64, dtype="float16")

    def test_no_directory(self, tmp_path: Path) -> None:
        with pytest.raises(ModelDirectoryError, match=r"nowhere: no such directory"):
            self.load(tmp_path / "nowhere")

    @pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
    def test_a_missing_file(self, llama: Path, name: str) -> None:
        (llama / name).unlink()
        with pytest.raises(ModelDirectoryError, match=f"llama: no {name}"):
            self.load(llama)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"{", r"config.json: not JSON"),
            (b"\xff\xfe", r"config.json: is not UTF-8"),
            (b"[1]", r"config.json: not a JSON object"),
            (b"{}", r"config.json: vocab_size is missing"),
        ],
    )
    def test_a_broken_configuration(self, llama: Path, content: bytes, reason: str) -> None:
        (llama / "config.json").write_bytes(content)
        with pytest.raises(ModelDirectoryError, match=reason):
            self.load(llama)

    def test_an_unknown_architecture(self, llama: Path) -> None:
        edit(llama / "config.json", model_type="unheard-of", architectures=["UnheardOf"])
        with pytest.raises(ModelDirectoryError, match="unheard-of"):
            self.load(llama)

    def test_no_weights(self, llama: Path) -> None:
        (llama / "model.safetensors").unlink()
        with pytest.raises(ModelDirectoryError, match=r"cannot be loaded: .*model\.safetensors"):
            self.load(llama)
        with pytest.raises(ModelDirectoryError, match="no weights"):
            _ = ModelDirectory(llama).model_fingerprint

    def test_truncated_weights(self, llama: Path) -> None:
        file = llama / "model.safetensors"
        file.write_bytes(file.read_bytes()[:-1000])
        with pytest.raises(ModelDirectoryError, match="cannot be loaded"):
            self.load(llama)

    def test_weights_that_lack_a_tensor(self, llama: Path) -> None:
        """Random initialization would serve nonsense."""
        file = llama / "model.safetensors"
        tensors = safetensors.torch.load_file(file)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(ModelDirectoryError, match=r"layers\.1\.mlp\.up_proj\.weight"):
            self.load(llama)

    def test_weights_of_another_shape(self, llama: Path) -> None:
        edit(llama / "config.json", intermediate_size=80)
        sizes = r"mlp\.down_proj\.weight has the shape \[64, 96\], must have \[64, 80\]"
        with pytest.raises(ModelDirectoryError, match=sizes):
            self.load(llama)

    def test_a_directory_that_is_not_exported(self, llama: Path) -> None:
        with pytest.raises(ModelDirectoryError, match=r"not an exported model .*specdec export"):
            OnnxEngine(ModelDirectory(llama), capacity=64, threads=1)

    @pytest.mark.parametrize("name", [GRAPH, COPY_GRAPH, DESCRIPTION])
    @pytest.mark.parametrize("content", [None, b"", b"nonsense"], ids=["missing", "empty", "nonsense"])
    def test_a_broken_export(self, llama: Path, name: str, content: bytes | None) -> None:
        """Files of the right names, one of them missing or damaged."""
        (llama / DESCRIPTION).write_text(json.dumps({"dtype": "float32", "pools": [], "window": None}))
        for file in (GRAPH, COPY_GRAPH):
            onnx.save(copy_graph("float32"), llama / file)
        if content is None:
            (llama / name).unlink()
        else:
            (llama / name).write_bytes(content)
        with pytest.raises(ModelDirectoryError, match=f"llama.*{name}"):
            OnnxEngine(ModelDirectory(llama), capacity=64, threads=1)


def edit(file: Path, **fields: object) -> None:
    """Replace fields of a JSON file."""
    content = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(content | fields), encoding="utf-8")
