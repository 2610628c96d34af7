"""Block drafts compute the formulas, from all layouts of files; parts that do not fit are refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.heads.block import BlockDraft
from specdec.engine.heads.block_files import BlockFiles
from specdec.engine.heads.eagle3_files import Eagle3Files
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.kinds import kind_in, memory_of_heads
from specdec.engine.heads.medusa_files import MedusaFiles
from specdec.engine.heads.text_memory import TextMemory
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.unsupported import UnsupportedModelError
from tests.heads import RandomBlock, Tensors, make_block, make_eagle3, make_heads, written
from tests.models import make
from verifier_service.heads_files import read_heads

STREAM, TOKENS, LAYERS = 10, 23, 6
TARGET = TargetShape(STREAM, TOKENS, STREAM, LAYERS)
SMALL = RandomBlock(
    stream=STREAM,
    vocabulary=TOKENS,
    hidden=STREAM,
    heads=4,
    kv_heads=2,
    head_dim=6,
    inner=14,
    outputs=TOKENS,
    layers=(0, 2, 5),
)
DSPARK = replace(SMALL, from_anchor=True, rank=4, confidence=True, reads_markov=True)
VARIANTS = {
    "dflash": SMALL,
    "one layer": replace(SMALL, own_layers=1, rows=2),
    "five features": replace(SMALL, layers=(1, 4, 2, 3, 3)),
    "own vocabulary": replace(SMALL, hidden=12, outputs=9, own_embeddings=True, own_output=True),
    "dspark": DSPARK,
    "gated": replace(DSPARK, markov="gated"),
    "rnn": replace(DSPARK, markov="rnn"),
    "confidence alone": replace(DSPARK, rank=0, reads_markov=False),
    "confidence of states": replace(DSPARK, reads_markov=False),
    "own copies": replace(DSPARK, own_embeddings=True, own_output=True),
    "dspark of few ids": replace(DSPARK, outputs=9, own_output=True),
}
EMBEDDINGS = torch.randn(TOKENS, STREAM, generator=torch.Generator().manual_seed(8))
OUTPUT = torch.randn(TOKENS, STREAM, generator=torch.Generator().manual_seed(9))
"""The target's token embeddings and output head."""

Numbers = NDArray[np.float64]


def target_output(states: Tensor) -> Tensor:
    return states @ OUTPUT.T


class Reference:
    """A block draft written from the formulas: one row at a time, in float64."""

    def __init__(self, sizes: RandomBlock) -> None:
        self.sizes = sizes
        self._tensors = {name: tensor.double().numpy() for name, tensor in sizes.tensors().items()}
        self._tensors.setdefault("embed_tokens.weight", EMBEDDINGS.double().numpy())
        self._tensors.setdefault("lm_head.weight", OUTPUT.double().numpy())

    def weight(self, name: str) -> Numbers:
        return self._tensors[f"{name}.weight"]

    def norm(self, x: Numbers, name: str) -> Numbers:
        return self.weight(name) * x / math.sqrt((x * x).mean() + 1e-5)

    def fused(self, features: Numbers) -> Numbers:
        """Return c of the features [m, d] of one position."""
        return self.norm(self.weight("fc") @ features.reshape(-1), "hidden_norm")

    def rotated(self, head: Numbers, position: int) -> Numbers:
        half = len(head) // 2
        turned = (head[:half] + 1j * head[half:]) * np.exp(1j * position * 1000.0 ** (-np.arange(half) / half))
        return np.concatenate([turned.real, turned.imag])

    def _heads(self, layer: int, name: str, x: Numbers, count: int, position: int) -> list[Numbers]:
        """Return the normalised and rotated queries or keys of an input."""
        heads = (self.weight(f"layers.{layer}.self_attn.{name}_proj") @ x).reshape(count, -1)
        return [self.rotated(self.norm(head, f"layers.{layer}.self_attn.{name}_norm"), position) for head in heads]

    def states(self, context: list[tuple[Numbers, int]], anchor: int, position: int) -> Numbers:
        """Return h [guesses, d'] after a context, whose rows each have c and a position."""
        sizes = self.sizes
        rows = [self.weight("embed_tokens")[token] for token in [anchor] + [sizes.mask] * (sizes.rows - 1)]
        for layer in range(sizes.own_layers):
            name = f"layers.{layer}"
            inputs = context + [
                (self.norm(row, f"{name}.input_layernorm"), position + place) for place, row in enumerate(rows)
            ]
            keys = [self._heads(layer, "k", x, sizes.kv_heads, at) for x, at in inputs]
            values = [(self.weight(f"{name}.self_attn.v_proj") @ x).reshape(sizes.kv_heads, -1) for x, _ in inputs]
            for place, (x, at) in enumerate(inputs[len(context) :]):
                attended = []
                for number, query in enumerate(self._heads(layer, "q", x, sizes.heads, at)):
                    own = number * sizes.kv_heads // sizes.heads
                    scores = np.array([query @ key[own] for key in keys]) / math.sqrt(sizes.head_dim)
                    weights = np.exp(scores - scores.max())
                    attended.append(sum(w * v[own] for w, v in zip(weights / weights.sum(), values, strict=True)))
                rows[place] = rows[place] + self.weight(f"{name}.self_attn.o_proj") @ np.concatenate(attended)
                normal = self.norm(rows[place], f"{name}.post_attention_layernorm")
                gate = self.weight(f"{name}.mlp.gate_proj") @ normal
                inner = gate / (1.0 + np.exp(-gate)) * (self.weight(f"{name}.mlp.up_proj") @ normal)
                rows[place] = rows[place] + self.weight(f"{name}.mlp.down_proj") @ inner
        guessing = rows if sizes.from_anchor else rows[1:]
        return np.stack([self.norm(row, "norm") for row in guessing])

    def markov(self, token: int, state: Numbers, memory: Numbers) -> tuple[Numbers, Numbers]:
        """Return the Markov head's part of the logits, and what it remembers."""
        before = self.weight("markov_head.markov_w1")[token]
        if self.sizes.markov == "gated":
            before = before * _sigmoid(self._joint("gate", state, before))
        elif self.sizes.markov == "rnn":
            gate, candidate, out = np.split(self._joint("joint", memory, before, state), 3)
            memory = _sigmoid(gate) * memory + (1.0 - _sigmoid(gate)) * np.tanh(candidate)
            before = np.tanh(out)
        return self.weight("markov_head.markov_w2") @ before, memory

    def confidence(self, token: int, state: Numbers) -> float:
        """Return the log-odds."""
        read = [state] + [self.weight("markov_head.markov_w1")[token]] * self.sizes.reads_markov
        weight, bias = self.weight("confidence_head.proj")[0], self._tensors["confidence_head.proj.bias"][0]
        return float(weight @ np.concatenate(read) + bias)

    def _joint(self, name: str, *parts: Numbers) -> Numbers:
        product = self.weight(f"markov_head.{name}_proj") @ np.concatenate(parts)
        return np.asarray(product + self._tensors[f"markov_head.{name}_proj.bias"])


def _sigmoid(x: Any) -> Any:
    return 1.0 / (1.0 + np.exp(-x))


def loaded(folder: Path) -> BlockDraft:
    return BlockFiles.of(folder, TARGET).load(EMBEDDINGS, target_output, "cpu", torch.float32)


def close(got: Tensor, want: Any) -> None:
    torch.testing.assert_close(got.double(), torch.from_numpy(np.asarray(want)), atol=1e-4, rtol=1e-4)


def memory_for(sizes: RandomBlock) -> TextMemory:
    return TextMemory(200, sizes.own_layers * sizes.kv_heads, sizes.head_dim, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("layout", ["authors", "speculators"])
@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=list(VARIANTS))
def test_they_compute_the_formulas(tmp_path: Path, sizes: RandomBlock, layout: str) -> None:
    """Two texts of different lengths, read in any order into any slots, and a block after each."""
    if layout == "speculators":
        written(tmp_path, sizes.tensors(), sizes.speculators())
    elif sizes.outputs < TOKENS:
        config = sizes.deepspec() if sizes.from_anchor else sizes.z_lab()
        written(tmp_path, sizes.tensors(), config | {"draft_vocab_size": sizes.outputs})
    else:
        make_block(tmp_path, sizes)
    assert BlockFiles.of(tmp_path, TARGET).config.layers == sizes.layers
    draft, reference, random = loaded(tmp_path), Reference(sizes), np.random.default_rng(3)
    memory = memory_for(sizes)
    contexts: list[list[tuple[Numbers, int]]] = []
    slots: list[NDArray[np.int64]] = []
    for length, first in ((5, 40), (2, 7)):
        features = random.normal(size=(length, len(sizes.layers), STREAM))
        positions = np.arange(first, first + length)
        fused, want = draft.fused(torch.from_numpy(features)), [reference.fused(own) for own in features]
        close(fused, want)
        contexts.append(list(zip(want, positions.tolist(), strict=True)))
        own = 1 + random.permutation(np.arange(100 * len(slots), 100 * len(slots) + length))
        order = random.permutation(length)
        draft.read(fused[order], torch.from_numpy(positions[order]), own[order], memory)
        slots.append(own)
    anchors, places = [3, 11], [45, 9]
    states = draft.states(torch.tensor(anchors), torch.tensor(places), slots, memory)
    want_states = [reference.states(*text) for text in zip(contexts, anchors, places, strict=True)]
    close(states, want_states)
    assert draft.guesses == states.shape[1] == sizes.rows - (not sizes.from_anchor)
    logits = draft.logits(states)
    assert logits.dtype == torch.float32
    close(logits, [own @ reference.weight("lm_head").T for own in want_states])


@pytest.mark.parametrize(("given", "guesses"), [(None, 4), (False, 4), (True, 5)])
@pytest.mark.parametrize("within", ["dflash_config", "config"])
def test_the_first_row_guesses_where_the_file_says_so(
    tmp_path: Path, given: bool | None, guesses: int, within: str
) -> None:
    config = SMALL.z_lab()
    (config["dflash_config"] if within == "dflash_config" else config)["sample_from_anchor"] = given
    assert loaded(written(tmp_path, SMALL.tensors(), config)).guesses == guesses


@pytest.mark.parametrize(
    ("kind", "tokens", "guesses"), [("dspark", 4, 4), ("dspark", 5, 5), ("dflash", 4, 4), ("dflash", None, 4)]
)
def test_speculators_tell_by_their_tokens_whether_the_first_row_guesses(
    tmp_path: Path, kind: str, tokens: int | None, guesses: int
) -> None:
    config = SMALL.speculators() | {"speculators_model_type": kind}
    config["speculators_config"] = {"proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": tokens}]}
    assert loaded(written(tmp_path, SMALL.tensors(), config)).guesses == guesses


@pytest.mark.parametrize(
    "proposals",
    [None, {}, {"proposal_methods": []}, {"proposal_methods": [{}]}, {"proposal_methods": [{"speculative_tokens": 3}]}],
)
def test_a_dspark_of_speculators_that_does_not_tell_is_refused(
    tmp_path: Path, proposals: dict[str, Any] | None
) -> None:
    config = SMALL.speculators() | {"speculators_model_type": "dspark", "speculators_config": proposals}
    said = "sample_from_anchor is missing, must be true or false if speculative_tokens is neither 4 nor 5"
    with pytest.raises(ModelDirectoryError, match=said):
        BlockFiles.of(written(tmp_path, SMALL.tensors(), config), TARGET)


@pytest.mark.parametrize("name", ["Qwen3DSparkModel", "DSparkDraftModel", "Lfm2DSparkDraftModel"])
@pytest.mark.parametrize("layout", ["z_lab", "deepspec"])
def test_the_first_row_guesses_in_drafts_named_after_dspark(tmp_path: Path, name: str, layout: str) -> None:
    config = getattr(SMALL, layout)() | {"architectures": [name]}
    assert loaded(written(tmp_path, SMALL.tensors(), config)).guesses == 5


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_markov_head_reads_the_guesses_before(tmp_path: Path, kind: str) -> None:
    """Two levels of two guesses each; parents are in the opposite order."""
    sizes = replace(DSPARK, markov=kind)
    draft, reference = loaded(make_block(tmp_path, sizes)), Reference(sizes)
    states = np.random.default_rng(4).normal(size=(2, 1, STREAM))
    memory: Tensor | None = None
    want_memory = [np.zeros(sizes.rank)] * 2
    for level, (tokens, origins) in enumerate((([3, 8], [0, 1]), ([5, 1], [1, 0]))):
        read = torch.from_numpy(states[level]).float().expand(1, 2, -1)
        remembered = None if memory is None else memory[:, origins]
        logits, memory = draft.markov(torch.tensor([tokens]), read, remembered)
        found = [
            reference.markov(token, states[level][0], want_memory[origin])
            for token, origin in zip(tokens, origins, strict=True)
        ]
        want_memory = [own for _, own in found]
        close(logits[0], [own for own, _ in found])
        confidence = draft.confidence(torch.tensor([tokens]), read)
        close(confidence[0], [reference.confidence(token, states[level][0]) for token in tokens])


def test_its_outputs_have_the_ids_of_the_map(tmp_path: Path) -> None:
    sizes = VARIANTS["own vocabulary"]
    draft = loaded(written(tmp_path, sizes.tensors(), sizes.speculators()))
    assert draft.ids is not None
    assert draft.ids.tolist() == (sizes.tensors()["d2t"] + torch.arange(9)).tolist()


def test_the_kind_of_heads_is_found_by_their_tensors(tmp_path: Path) -> None:
    target = ModelDirectory(make("llama", tmp_path / "target"))
    block = make_block(tmp_path / "block")
    assert isinstance(read_heads(block, None, target).files, BlockFiles)
    assert kind_in(block / "model.safetensors") is BlockFiles
    assert kind_in(make_eagle3(tmp_path / "eagle")) is Eagle3Files
    assert kind_in(make_heads(tmp_path / "medusa")) is MedusaFiles
    tree = tmp_path / "tree.json"
    tree.write_text("[[0]]")
    with pytest.raises(
        ModelDirectoryError,
        match=r"tree.json: needs Medusa heads; .*block has block heads, which build their own trees",
    ):
        read_heads(block, tree, target)


# --- refusals ---------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], Tensors], object]


def field(name: str, value: Any) -> Change:
    return lambda config, _: config.update({name: value})


def without(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


def tensor(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("name", "value"),
    [("causal", True), ("causal_head", True), ("is_causal", True), ("use_swa", True), ("rope_is_neox_style", False)],
)
@pytest.mark.parametrize("within", ["", "dflash_config.", "transformer_layer_config."])
def test_other_attention_is_refused_wherever_the_file_asks_for_it(
    tmp_path: Path, name: str, value: bool, within: str
) -> None:
    config = SMALL.speculators() if within.startswith("transformer") else SMALL.z_lab()
    (config[within[:-1]] if within else config)[name] = value
    said = f"{within}{name} is {json.dumps(value)}, must be {json.dumps(not value)} or missing"
    with pytest.raises(ModelDirectoryError, match=said):
        BlockFiles.of(written(tmp_path, SMALL.tensors(), config), TARGET)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("fc.weight"), r"lacks fc.weight, of the shape \[10, 30\]"),
        (without("layers.1.self_attn.q_norm.weight"), r"lacks layers.1.self_attn.q_norm.weight, of the shape \[6\]"),
        (without("layers.0.mlp.up_proj.weight"), r"lacks layers.0.mlp.up_proj.weight, of the shape \[14, 10\]"),
        (without("markov_head.markov_w2.weight"), r"lacks markov_head.markov_w2.weight, of the shape \[23, 4\]"),
        (without("confidence_head.proj.bias"), r"lacks confidence_head.proj.bias, of the shape \[1\]"),
        (tensor("confidence_head.proj.weight", 1, 10), r"has the shape \[1, 10\], must have \[1, 14\]"),
        (
            tensor("layers.2.mlp.up_proj.weight", 14, 10),
            "layers.2.mlp.up_proj.weight is unexpected: heads of this config.json have no such tensor",
        ),
        (tensor("layers.0.self_attn.q_proj.bias", 24), "q_proj.bias is no part of a DFlash or DSpark block draft"),
        (
            tensor("markov_head.gate_proj.weight", 4, 14),
            "gate_proj.weight is unexpected: heads of this config.json have no such tensor",
        ),
        (field("markov_head_type", "gated"), r"lacks markov_head.gate_proj.weight, of the shape \[4, 14\]"),
        (field("markov_head_type", "lstm"), 'markov_head_type is "lstm", must be vanilla, gated or rnn'),
        (field("markov_rank", 0), "confidence_head_with_markov is true, must be false without a Markov head"),
        (field("draft_vocab_size", 9), r"markov_w2.weight has the shape \[23, 4\], must have \[9, 4\]"),
        (field("input_embedding_scale", 2.0), "input_embedding_scale is 2.0, must be 1.0 or missing"),
        (field("final_logit_softcapping", 30.0), "final_logit_softcapping is 30.0, must be 0.0 or missing"),
        (field("shift_label", True), "shift_label is true, must be false or missing"),
        (
            lambda config, _: config.update(layer_types=None, use_sliding_window=True),
            "use_sliding_window is true, must be false: sliding windows are not supported",
        ),
        (field("mask_token_id", TOKENS), "mask_token_id is 23, must be an integer from 0 to 22"),
        (field("mask_token_id", None), "mask_token_id is null, must be an integer"),
        (field("block_size", 0), "block_size is 0, must be an integer from 1 to 64"),
        (field("target_layer_ids", [0, 5]), r"target_layer_ids\[1\] is 5, must be an integer from -1 to 4"),
        (field("target_layer_ids", []), "target_layer_ids is .*, must be a non-empty list of layers"),
        (field("target_layer_ids", None), "target_layer_ids is null, must be an integer from -1 to 4"),
        (field("layer_types", ["sliding_attention"] * 2), "layer_types is .*, must be full_attention in all layers"),
        (field("partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5, must be 1: rotary embeddings of a part"),
        (field("attention_bias", True), "attention_bias is true, must be false"),
        (field("projector_type", "domino"), 'projector_type is "domino", must be "dflash" or missing'),
        (field("vocab_size", 24), "vocab_size is 24, must be 23, that of the target"),
        (field("speculators_model_type", "peagle"), 'speculators_model_type is "peagle", must be dflash or dspark'),
        (
            lambda config, _: config.update(block_size=1, sample_from_anchor=False),
            "block_size is 1, must be 2 or more, or sample_from_anchor true",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: Change, why: str) -> None:
    """Before weights are read."""
    config, tensors = DSPARK.deepspec(), DSPARK.tensors()
    change(config, tensors)
    with pytest.raises(ModelDirectoryError, match=why):
        BlockFiles.of(written(tmp_path / "heads", tensors, config), TARGET)


def test_without_a_configuration_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsFilesError, match=r"has no config.json, which block drafts need"):
        BlockFiles.of(written(tmp_path / "heads", SMALL.tensors()), TARGET)


def test_a_start_without_room_for_it_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the weights, and for keys and values of all layers for every token that the target has room for."""
    target, sizes = make("llama", tmp_path / "target"), RandomBlock()
    draft = make_block(tmp_path / "block", sizes)
    wanted = Wanted(target, Placement(kv_tokens=700))
    monkeypatch.setattr("specdec.engine.preflight.check.free_bytes", lambda _: 600_000_000)
    numbers = sum(own.numel() for own in sizes.tensors().values())
    said = rf"heads block needs {4 * numbers / 1e9:.3g} GB for weights in float32, {700 * 4 * 96 / 1e9:.3g} GB for 700 "
    with pytest.raises(UnsupportedModelError, match=said):
        check(wanted, beside=partial(memory_of_heads, draft))


PUBLISHED: dict[str, tuple[dict[str, Any], RandomBlock]] = {
    "DFlash for Qwen3-8B (z-lab)": (
        {"num_target_layers": 36},
        RandomBlock(4096, 151_936, 4096, 5, 32, 8, 128, 12_288, 151_936, (2, 10, 18, 26, 34), rows=16, mask=151_669),
    ),
    "DSpark for Qwen3-8B (DeepSpec)": (
        {"tie_word_embeddings": False},
        RandomBlock(
            4096,
            151_936,
            4096,
            5,
            32,
            8,
            128,
            12_288,
            151_936,
            (2, 10, 18, 26, 34),
            rows=7,
            mask=151_669,
            from_anchor=True,
            rank=256,
            confidence=True,
            reads_markov=True,
            own_embeddings=True,
            own_output=True,
        ),
    ),
}


@pytest.mark.parametrize("name", list(PUBLISHED))
def test_drafts_of_published_shapes_are_judged_by_headers(tmp_path: Path, name: str) -> None:
    """2 to 5 GB, in a file without contents."""
    more, sizes = PUBLISHED[name]
    shapes = sizes.shapes
    ends = list(accumulate(2 * math.prod(shape) for shape in shapes.values()))
    header = json.dumps(
        {
            tensor: {"dtype": "BF16", "shape": shape, "data_offsets": [end - 2 * math.prod(shape), end]}
            for (tensor, shape), end in zip(shapes.items(), ends, strict=True)
        }
    ).encode()
    config = sizes.deepspec() if sizes.from_anchor else sizes.z_lab()
    (tmp_path / "config.json").write_text(json.dumps(config | more))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    files = BlockFiles.of(tmp_path, TargetShape(4096, 151_936, 4096, 36))
    assert files.config.layers == sizes.layers
    assert files.config.variant.from_anchor == sizes.from_anchor
    needed = files.memory_needed("bfloat16", 1000)
    assert needed.weights == ends[-1]
    assert needed.kv == 1000 * 2 * 5 * 8 * 128 * 2
