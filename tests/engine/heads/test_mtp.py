"""MTP layers compute the same as transformers' own layers and MTP models, from both layouts of files; parts that do not
fit are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    MellumConfig,
    MellumForCausalLM,
    PreTrainedModel,
)
from transformers.modeling_layers import MtpModel

from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.fusion import as_bytes, from_bytes
from specdec.engine.heads.growth import AutoregressiveReader, TreeAnchor, reader_of
from specdec.engine.heads.kinds import feature_heads_in, kind_in, memory_of_heads
from specdec.engine.heads.mtp import MtpHeads
from specdec.engine.heads.mtp_files import MtpFiles
from specdec.engine.heads.target_ends import ends_of
from specdec.engine.heads.text_memory import TextMemory
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.preflight.weights import bytes_of
from tests.heads import Tensors, make_mtp, mtp_model, written
from tests.models import ARCHITECTURES, VOCABULARY, make, save

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
}


def glm() -> PreTrainedModel:
    config = Glm4MoeConfig(
        **SIZES,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        partial_rotary_factor=0.5,
    )
    return Glm4MoeForCausalLM(config)


def mellum() -> PreTrainedModel:
    kinds = ["sliding_attention", "full_attention"]
    own = {"num_experts": 4, "num_experts_per_tok": 2, "sliding_window": 40, "num_mtp_layers": 1, "layer_types": kinds}
    config = MellumConfig(**SIZES, **own)
    return MellumForCausalLM(config)


OTHERS = {"glm4_moe": glm, "mellum": mellum}
"""Architectures whose checkpoints have MTP layers, with experts."""


def target_of(name: str, folder: Path) -> Path:
    """Save a target of an architecture, and return its folder."""
    if name in ARCHITECTURES:
        return make(name, folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return save(OTHERS[name](), folder)


def loaded(folder: Path, target: Path) -> MtpHeads:
    shape = TargetShape.of(ModelDirectory(target))
    ends = ends_of(target, shape, "cpu", torch.float32)
    return MtpFiles.of(folder, shape).load(ends.embeddings, ends.logits, "cpu", torch.float32)


def checkpoint_of(folder: Path, target: Path, heads: Path, more: Tensors | None = None) -> Path:
    """Write a target and its MTP layer as one checkpoint."""
    tensors = load_file(target / "model.safetensors") | load_file(heads / "model.safetensors") | (more or {})
    written(folder, tensors, json.loads((heads / "config.json").read_text()))
    for file in target.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


class Reference:
    """An MTP layer by transformers' layer and the formulas: every text is computed from its beginning."""

    def __init__(self, target: Path, folder: Path) -> None:
        whole: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
        self._model = whole
        own = mtp_model(target)
        self._layer, self._rotary, config = own.model.layers[-1], own.model.rotary_emb, own.config
        self._options = {"layer_type": config.layer_types[-1]} if config.model_type == "mellum" else {}
        begin = f"model.layers.{config.num_hidden_layers - 1}."
        stored = load_file(folder / "model.safetensors").items()
        self._weights = {name.removeprefix(begin): tensor for name, tensor in stored}
        self._epsilon = config.rms_norm_eps

    @torch.inference_mode()
    def states(self, text: list[int]) -> Tensor:
        """Return the target's states [t, d]."""
        states: Tensor = self._model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state[0]
        return states

    @torch.inference_mode()
    def logits(self, text: list[int], guesses: list[int]) -> Tensor:
        """Return the logits [1 + guesses, ids] after a text's last token, and after each guess that follows it."""
        states, found = self.states(text[:-1]), list[Tensor]()
        for end in range(len(guesses) + 1):
            tokens = torch.tensor([*text[1:], *guesses[:end]])
            embedded = self._norm(self._model.model.embed_tokens(tokens), "enorm", "mtp.pre_fc_norm_embedding")
            normal = self._norm(states, "hnorm", "mtp.pre_fc_norm_hidden")
            x = torch.cat([embedded, normal], dim=-1) @ self._weight("eh_proj", "mtp.fc").T
            positions = torch.arange(len(x))[None]
            angles = self._rotary(x[None], positions, **self._options)
            output = self._layer(x[None], attention_mask=None, position_ids=positions, position_embeddings=angles)
            last = self._norm(output[0, -1:], "shared_head.norm", "mtp.norm")
            found.append(self._model.lm_head(last)[0])
            states = torch.cat([states, last])
        return torch.stack(found)

    def _weight(self, *names: str) -> Tensor:
        return next(self._weights[f"{name}.weight"] for name in names if f"{name}.weight" in self._weights)

    def _norm(self, x: Tensor, *names: str) -> Tensor:
        return self._weight(*names) * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._epsilon)


def text_of(length: int, seed: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length)]


CASES = [("llama", "model"), ("qwen2", "model"), ("qwen3", "mtp"), ("glm4_moe", "model"), ("mellum", "mtp")]


@pytest.mark.parametrize(("name", "layout"), CASES)
@torch.inference_mode()
def test_it_computes_the_formulas(tmp_path: Path, name: str, layout: str) -> None:
    """Two texts of different lengths, read in any order into any slots, and three levels of a tree below each."""
    target = target_of(name, tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target, layout=layout)
    heads, reference = loaded(folder, target), Reference(target, folder)
    memory = TextMemory(200, 2, 16 if name in ("llama", "qwen2") else 24, torch.float32, torch.device("cpu"))
    reader, random = reader_of(heads, memory), np.random.default_rng(1)
    assert isinstance(reader, AutoregressiveReader)
    texts, anchors = [text_of(30, 2), text_of(12, 3)], list[TreeAnchor]()
    for number, text in enumerate(texts):
        fused = heads.fused(reference.states(text[:-1])[:, None])
        count = len(fused)
        slots = 1 + random.permutation(np.arange(100 * number, 100 * number + count))
        order = random.permutation(count).tolist()
        reader.keep([text[at + 1] for at in order], order, fused[order], slots[order])
        anchors.append(TreeAnchor(text[-1], len(text), slots, fused[-1]))
    growth = reader.growth(anchors, 3)
    paths: list[list[list[int]]] = [[[]], [[]]]  # guesses up to each row of the level
    origins = [[0], [0]]
    for level in range(3):
        tokens = [[(path or text)[-1] for path in own] for own, text in zip(paths, texts, strict=True)]
        logits = growth.level(torch.tensor(tokens), torch.tensor(origins)).logits
        want = torch.stack(
            [
                torch.stack([reference.logits(text, path)[-1] for path in own])
                for own, text in zip(paths, texts, strict=True)
            ]
        )
        torch.testing.assert_close(logits, want, atol=2e-3, rtol=2e-3)
        origins = [[0, 0, 0], [0, 0, 0]] if level == 0 else [[2, 0, 2], [1, 1, 0]]
        paths = [
            [[*own[origin], int(random.integers(3, VOCABULARY))] for origin in below]
            for own, below in zip(paths, origins, strict=True)
        ]


@pytest.mark.parametrize(("name", "layout"), [("glm4_moe", "model"), ("mellum", "mtp")])
@torch.inference_mode()
def test_it_guesses_as_transformers_does(tmp_path: Path, name: str, layout: str) -> None:
    """The first guesses equal those of transformers' MTP model, which reads the same files in its own way."""
    target = target_of(name, tmp_path / "target")
    both = checkpoint_of(tmp_path / "both", target, make_mtp(tmp_path / "heads", target, layout=layout))
    model: Any = AutoModelForCausalLM.from_pretrained(both, dtype=torch.float32).eval()
    if name == "glm4_moe":
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.2\."]  # its own is for published models' layers
    theirs = MtpModel.from_pretrained(model).eval()
    heads, text = loaded(both, both), text_of(20, 4)
    states = model.model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
    last = theirs.forward_layer(
        0, states[:, :-1], torch.arange(1, len(text))[None], None, input_ids=torch.tensor([text[1:]])
    )
    fused = heads.fused(states[0, :-1, None])
    memory = TextMemory(64, 2, 24, torch.float32, torch.device("cpu"))
    reader, slots = reader_of(heads, memory), np.arange(1, len(text))
    reader.keep(text[1:], range(len(fused)), fused, slots)
    growth = reader.growth([TreeAnchor(text[-1], len(text), slots, fused[-1])], 1)
    logits = growth.level(torch.tensor([[text[-1]]]), torch.tensor([[0]])).logits[0, 0]
    torch.testing.assert_close(logits, model.lm_head(last[0, -1]), atol=2e-3, rtol=2e-3)


def test_the_verifier_s_part_is_the_half_for_its_states(tmp_path: Path) -> None:
    """A verifier without the layer computes what the heads read, up to rounding to bfloat16 on the wire."""
    target = target_of("qwen3", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    heads, files = loaded(folder, target), feature_heads_in(folder, TargetShape.of(ModelDirectory(target)))
    assert files.config.layers == (2,)
    states = torch.randn(5, 1, 64, generator=torch.Generator().manual_seed(0))
    fused = files.fusion("cpu", torch.float32)(states)
    torch.testing.assert_close(fused, heads.fused(states))
    sent = from_bytes(as_bytes(fused), files.config.layer.sizes.hidden).float()
    torch.testing.assert_close(sent, fused, atol=0.0, rtol=0.01)


def test_the_order_of_its_inputs_can_be_turned(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    product = tensors["model.layers.2.eh_proj.weight"]
    tensors["model.layers.2.eh_proj.weight"] = torch.cat(product.chunk(2, dim=1)[::-1], dim=1)
    turned = loaded(written(tmp_path / "turned", tensors, config | {"mtp_hidden_states_first": True}), target)
    states = torch.randn(3, 1, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(turned.fused(states), loaded(folder, target).fused(states))


def test_a_verifier_and_a_draft_that_read_other_halves_do_not_fit(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    other = written(tmp_path / "other", tensors, config | {"mtp_hidden_states_first": True})
    one, two = (MtpFiles.of(place, TargetShape.of(ModelDirectory(target))) for place in (folder, other))
    assert one.fusion_fingerprint() != two.fusion_fingerprint()
    assert one.fusion_fingerprint() == MtpFiles.of(folder, one.target).fusion_fingerprint()


def test_a_layer_with_a_sliding_window_sees_no_more(tmp_path: Path) -> None:
    target = target_of("mellum", tmp_path / "target")
    files = MtpFiles.of(make_mtp(tmp_path / "heads", target, layout="mtp"), TargetShape.of(ModelDirectory(target)))
    assert files.config.layer.context == 40


def test_copies_of_the_ends_are_not_read(tmp_path: Path) -> None:
    """They are read neither as weights of the layer nor as weights of the target."""
    target = target_of("llama", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    names = "model.layers.2.embed_tokens.weight", "model.layers.2.shared_head.head.weight"
    both = checkpoint_of(tmp_path / "both", target, folder, {name: torch.zeros(VOCABULARY, 64) for name in names})
    heads, states = loaded(both, both), torch.randn(2, 64)
    assert kind_in(both) is MtpFiles
    assert torch.equal(heads.outcome(states)[0], loaded(folder, target).outcome(states)[0])


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_its_weights_do_not_count_as_the_target_s(tmp_path: Path, name: str, layout: str) -> None:
    target = target_of(name, tmp_path / "target")
    both = checkpoint_of(tmp_path / "both", target, make_mtp(tmp_path / "heads", target, layout=layout))
    assert bytes_of(ModelDirectory(both), None) == bytes_of(ModelDirectory(target), None)


def test_its_memory_is_that_of_the_layer(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    needed = memory_of_heads(folder, ModelDirectory(target), "float32", 700)
    assert needed.weights == sum(4 * own.numel() for own in load_file(folder / "model.safetensors").values())
    assert needed.kv == 700 * 4 * 2 * 2 * 16
    check(Wanted(target, Placement(kv_tokens=700)), beside=partial(memory_of_heads, folder))


# --- refusals ---------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], Tensors], object]


def field(name: str, value: Any) -> Change:
    return lambda config, _: config.update({name: value})


def without(name: str) -> Change:
    return lambda _, tensors: tensors.pop(f"model.layers.2.{name}")


def tensor(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: torch.zeros(*shape)})


def changed(place: Path, change: Change) -> tuple[Path, Path]:
    """Return the folders of an MTP layer with one change, and of its target."""
    target = target_of("llama", place / "target")
    folder = make_mtp(place / "heads", target)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    change(config, tensors)
    return written(place / "changed", tensors, config), target


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("eh_proj.weight"), "has neither eh_proj.weight nor mtp.fc.weight, must have one MTP layer"),
        (without("hnorm.weight"), r"lacks model.layers.2.hnorm.weight, of the shape \[64\]"),
        (without("shared_head.norm.weight"), "lacks model.layers.2.shared_head.norm.weight"),
        (without("self_attn.q_proj.weight"), r"lacks model.layers.2.self_attn.q_proj.weight, of the shape \[64, 64\]"),
        (tensor("model.layers.2.eh_proj.weight", 64, 64), r"has the shape \[64, 64\], must have \[64, 128\] for heads"),
        (tensor("model.layers.2.self_attn.k_proj.weight", 64, 64), r"has the shape \[64, 64\], must have \[32, 64\]"),
        (tensor("model.layers.3.eh_proj.weight", 64, 128), "must have one MTP layer"),
        (
            field("num_nextn_predict_layers", 2),
            "num_nextn_predict_layers is 2, must be 1: other numbers of MTP layers are not",
        ),
        (field("mtp_num_hidden_layers", 0), "mtp_num_hidden_layers is 0, must be 1"),
        (field("quantization_config", {"quant_method": "fp8"}), "quantization_config is .*, must be left out"),
        (field("vocab_size", 9), "vocab_size is 9, must be 320, that of the target"),
        (field("hidden_size", 32), "hidden_size is 32, must be 64, that of the target's output head"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: Change, why: str) -> None:
    """Before weights are read."""
    folder, target = changed(tmp_path, change)
    with pytest.raises(ModelDirectoryError, match=why):
        MtpFiles.of(folder, TargetShape.of(ModelDirectory(target)))


def test_a_layer_of_another_number_is_refused(tmp_path: Path) -> None:
    target = target_of("llama", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    with pytest.raises(HeadsFilesError, match=r"model.layers.2.eh_proj.weight must belong to layer 5, the one after"):
        MtpFiles.of(folder, TargetShape.of(ModelDirectory(target))._replace(layers=5))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("mlp.up_proj.weight"), "its MTP layer lacks 1 tensors, such as model.layers.0.mlp.up_proj.weight"),
        (
            tensor("model.layers.2.mlp.up_proj.weight", 3, 64),
            r"mlp.up_proj.weight .* has the shape \[3, 64\], must have",
        ),
        (tensor("model.layers.2.mlp.other.weight", 3), "has model.layers.0.mlp.other.weight, which is not used"),
    ],
)
def test_what_is_no_layer_of_the_architecture_is_refused_by_name(tmp_path: Path, change: Change, why: str) -> None:
    folder, target = changed(tmp_path, change)
    with pytest.raises(HeadsFilesError, match=why):
        loaded(folder, target)


def test_norms_that_are_no_plain_rms_norms_are_refused(tmp_path: Path) -> None:
    target = target_of("gemma3", tmp_path / "target")
    folder = make_mtp(tmp_path / "heads", target)
    with pytest.raises(
        HeadsFilesError, match="Gemma3RMSNorm is not supported in MTP layers: it is not a plain RMS norm"
    ):
        loaded(folder, target)
