"""EAGLE-3 heads compute the formulas, from both layouts of files; parts that do not fit are refused by name."""

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

from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.loading import load_engine
from specdec.engine.heads.eagle3 import Eagle3Heads
from specdec.engine.heads.eagle3_config import Eagle3Config
from specdec.engine.heads.eagle3_files import Eagle3Files
from specdec.engine.heads.files import HeadsFilesError, TargetShape
from specdec.engine.heads.growth import CONTEXT
from specdec.engine.heads.kinds import kind_in, memory_of_heads
from specdec.engine.heads.text_memory import TextMemory, TreeContext
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import Fields, ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.unsupported import UnsupportedModelError
from tests.heads import RandomEagle3, Tensors, make_eagle3, make_heads, written
from tests.models import make
from verifier_service.heads_files import read_heads
from verifier_service.proposers.feature_heads import FeatureHeadsProposer

STREAM, TOKENS, LAYERS = 10, 23, 6
TARGET = TargetShape(STREAM, TOKENS, STREAM, LAYERS)
SMALL = RandomEagle3(
    stream=STREAM,
    vocabulary=TOKENS,
    hidden=12,
    heads=4,
    kv_heads=2,
    head_dim=6,
    inner=14,
    outputs=9,
    layers=(0, 2, 5),
)
SHARING = replace(SMALL, hidden=STREAM, heads=2, kv_heads=1, head_dim=4, own_embeddings=False)
VARIANTS = {
    "plain": SMALL,
    "norm_before_residual": replace(SMALL, norm_before_residual=True),
    "norm_before_fc": replace(SMALL, norm_before_fc=True),
    "eagle 3.1": replace(SMALL, fc_norm=True, norm_output=True),
    "default layers": replace(SMALL, layers=None),
    "five features": replace(SMALL, layers=(1, 4, 0, 3, 3)),
    "all tokens": replace(SMALL, outputs=TOKENS),
    "target's embeddings": SHARING,
    "target's output": replace(SHARING, outputs=TOKENS, own_output=False),
    "linear rope": replace(SMALL, rope={"rope_theta": 1000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}),
    "newer rope": replace(SMALL, rope={"rope_parameters": {"rope_type": "default", "rope_theta": 1000.0}}),
    "one key head for each": replace(SMALL, kv_heads=4),
}
EMBEDDINGS = torch.randn(TOKENS, STREAM, generator=torch.Generator().manual_seed(8))
OUTPUT = torch.randn(TOKENS, STREAM, generator=torch.Generator().manual_seed(9))
"""The target's token embeddings and output head."""

Numbers = NDArray[np.float64]


def target_output(states: Tensor) -> Tensor:
    return states @ OUTPUT.T


class Reference:
    """EAGLE-3 heads written from the formulas: one row at a time, in float64."""

    def __init__(self, sizes: RandomEagle3) -> None:
        self.sizes = sizes
        self._weights = {name: tensor.double().numpy() for name, tensor in sizes.tensors().items()}
        self._weights.setdefault("embed_tokens.weight", EMBEDDINGS.double().numpy())
        self._weights.setdefault("lm_head.weight", OUTPUT.double().numpy())

    def weight(self, name: str) -> Numbers:
        return self._weights[f"{name}.weight"]

    def norm(self, x: Numbers, name: str) -> Numbers:
        return self.weight(name) * x / math.sqrt((x * x).mean() + 1e-5)

    def fused(self, features: Numbers) -> Numbers:
        """Return g of the features [m, d] of one position."""
        if self.sizes.fc_norm:
            features = np.stack([self.norm(own, f"fc_norm.{place}") for place, own in enumerate(features)])
        joined = features.reshape(-1)
        if self.sizes.norm_before_fc:
            joined = self.norm(joined, "input_norm")
        return self.weight("fc") @ joined

    def rotated(self, head: Numbers, position: int) -> Numbers:
        half, factor = len(head) // 2, 2.0 if "rope_scaling" in self.sizes.rope else 1.0
        numbers = head[:half] + 1j * head[half:]
        angles = position / factor * 1000.0 ** (-np.arange(half) / half)
        turned = numbers * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag])

    def state(self, rows: list[tuple[int, Numbers, int]]) -> Numbers:
        """Return s of the last row. Each row has a token, g and a position, and sees the rows before it."""
        sizes, keys, values = self.sizes, [], []
        for token, g, position in rows:
            e = self.norm(self.weight("embed_tokens")[token], "midlayer.input_layernorm")
            normal = self.norm(g, "midlayer.hidden_norm")
            u = np.concatenate([e, normal])
            heads = (self.weight("midlayer.self_attn.k_proj") @ u).reshape(sizes.kv_heads, -1)
            keys.append([self.rotated(head, position) for head in heads])
            values.append((self.weight("midlayer.self_attn.v_proj") @ u).reshape(sizes.kv_heads, -1))
        residual = normal if sizes.norm_before_residual else g
        attended = []
        for number, query in enumerate((self.weight("midlayer.self_attn.q_proj") @ u).reshape(sizes.heads, -1)):
            own = number * sizes.kv_heads // sizes.heads
            turned = self.rotated(query, position)
            scores = np.array([turned @ key[own] for key in keys]) / math.sqrt(sizes.head_dim)
            weights = np.exp(scores - scores.max())
            attended.append(sum(w * value[own] for w, value in zip(weights / weights.sum(), values, strict=True)))
        state = residual + self.weight("midlayer.self_attn.o_proj") @ np.concatenate(attended)
        x = self.norm(state, "midlayer.post_attention_layernorm")
        gate = self.weight("midlayer.mlp.gate_proj") @ x
        inner = gate / (1.0 + np.exp(-gate)) * (self.weight("midlayer.mlp.up_proj") @ x)
        return np.asarray(state + self.weight("midlayer.mlp.down_proj") @ inner)

    def outcome(self, state: Numbers) -> tuple[Numbers, Numbers]:
        """Return the logits of s, and the g that children read."""
        normal = self.norm(state, "norm")
        return self.weight("lm_head") @ normal, normal if self.sizes.norm_output else state


def loaded(folder: Path) -> Eagle3Heads:
    return Eagle3Files.of(folder, TARGET).load(EMBEDDINGS, target_output, "cpu", torch.float32)


def close(got: Tensor, want: Any) -> None:
    torch.testing.assert_close(got.double(), torch.from_numpy(np.asarray(want)), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layout", ["eagle", "speculators", "pickled"])
@pytest.mark.parametrize("sizes", VARIANTS.values(), ids=list(VARIANTS))
def test_they_compute_the_formulas(tmp_path: Path, sizes: RandomEagle3, layout: str) -> None:
    """Two texts of different lengths, read in any order into any slots, and three levels of a tree below each."""
    if layout == "speculators":
        written(tmp_path, sizes.tensors("layers.0"), sizes.speculators())
    else:
        name = "pytorch_model.bin" if layout == "pickled" else "model.safetensors"
        written(tmp_path, sizes.tensors(), sizes.eagle(), name=name)
    heads, reference, random = loaded(tmp_path), Reference(sizes), np.random.default_rng(3)
    memory = TextMemory(200, sizes.kv_heads, sizes.head_dim, torch.float32, torch.device("cpu"))
    count = 3 if sizes.layers is None else len(sizes.layers)
    texts: list[list[tuple[int, Numbers, int]]] = []  # rows of each text, as the reference takes them
    slots: list[NDArray[np.int64]] = []
    for length, first in ((5, 40), (2, 7)):
        features = random.normal(size=(length, count, STREAM))
        tokens, positions = random.integers(0, TOKENS, length), np.arange(first, first + length)
        fused = heads.fused(torch.from_numpy(features))
        want = [reference.fused(own) for own in features]
        close(fused, want)
        texts.append(list(zip(tokens.tolist(), want, positions.tolist(), strict=True)))
        own = 1 + random.permutation(np.arange(100 * len(slots), 100 * len(slots) + length - 1))
        order = random.permutation(length - 1)
        rows = torch.from_numpy(order)
        heads.read(torch.from_numpy(tokens)[rows], fused[rows], torch.from_numpy(positions)[rows], own[order], memory)
        slots.append(own)
    trees = TreeContext(memory, slots, 1 + 3 + 3)
    paths = [[text] for text in texts]  # rows up to each row of the level
    origins = [[0], [0]]
    for level in range(3):
        states = heads.grow(
            torch.tensor([[path[-1][0] for path in own] for own in paths]),
            torch.tensor(np.array([[path[-1][1] for path in own] for own in paths])).float(),
            torch.tensor([[path[-1][2] for path in own] for own in paths]),
            trees,
            torch.tensor(origins),
        )
        want_states = [[reference.state(path) for path in own] for own in paths]
        close(states, want_states)
        logits, carried = heads.outcome(states)
        assert logits.dtype == torch.float32
        outcomes = [[reference.outcome(state) for state in own] for own in want_states]
        close(logits, [[own for own, _ in found] for found in outcomes])
        close(carried, [[own for _, own in found] for found in outcomes])
        origins = [[0, 0, 0], [0, 0, 0]] if level == 0 else [[2, 0, 2], [1, 1, 0]]
        paths = [
            [
                [*own[origin], (int(random.integers(TOKENS)), found[origin][1], own[origin][-1][2] + 1)]
                for origin in below
            ]
            for own, found, below in zip(paths, outcomes, origins, strict=True)
        ]


def test_their_outputs_have_the_ids_of_the_map(tmp_path: Path) -> None:
    heads = loaded(written(tmp_path, SMALL.tensors(), SMALL.eagle()))
    assert heads.ids is not None
    assert heads.ids.tolist() == torch.nonzero(SMALL.tensors()["t2d"]).flatten().tolist()
    assert loaded(make_eagle3(tmp_path / "all", replace(SMALL, outputs=TOKENS))).ids is None


def test_they_see_as_many_rows_as_they_are_trained_for(tmp_path: Path) -> None:
    """Without this field, heads count as trained for Llama's usual 2,048. None see more than the verifier's limit."""
    target = ModelDirectory(make("llama", tmp_path / "target"))
    engine = CpuEngine(target, capacity=256, exact=False)

    def context(name: str, positions: int | None) -> int:
        heads = RandomEagle3()
        config = {**heads.eagle(), "max_position_embeddings": positions}
        if positions is None:
            del config["max_position_embeddings"]
        proposer = read_heads(written(tmp_path / name, heads.tensors(), config), None, target).load(engine)
        assert isinstance(proposer, FeatureHeadsProposer)
        return proposer._reader.context

    assert context("short", 48) == 48
    assert context("silent", None) == 2048
    assert context("long", 131_072) == CONTEXT


def test_what_a_training_keeps_beside_them_is_not_read(tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path / "heads", SMALL)
    written(folder, {"done": torch.tensor(3), "0": torch.zeros(4)}, name="training.safetensors")
    assert loaded(folder).shape.outputs == 9


def test_an_old_buffer_of_rotary_embeddings_is_not_read(tmp_path: Path) -> None:
    tensors = SMALL.tensors() | {"midlayer.self_attn.rotary_emb.inv_freq": torch.zeros(3)}
    assert loaded(written(tmp_path, tensors, SMALL.eagle())).shape.outputs == 9


# --- refusals ---------------------------------------------------------------------------------------

Change = Callable[[dict[str, Any], Tensors], object]


def field(name: str, value: Any) -> Change:
    return lambda config, _: config.update({name: value})


def without(name: str) -> Change:
    return lambda _, tensors: tensors.pop(name)


def tensor(name: str, *shape: int) -> Change:
    return lambda _, tensors: tensors.update({name: torch.zeros(*shape)})


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (without("midlayer.mlp.up_proj.weight"), r"lacks midlayer.mlp.up_proj.weight, of the shape \[14, 12\]"),
        (without("midlayer.self_attn.v_proj.weight"), r"lacks midlayer.self_attn.v_proj.weight"),
        (without("fc.weight"), r"lacks fc.weight, of the shape \[12, 30\]"),
        (without("norm.weight"), "lacks norm.weight"),
        (without("d2t"), r"lacks d2t, of the shape \[9\]"),
        (without("lm_head.weight"), r"lacks lm_head.weight, of the shape \[9, 12\]"),
        (without("embed_tokens.weight"), r"lacks embed_tokens.weight, of the shape \[23, 12\]"),
        (
            tensor("fc.weight", 12, 2 * STREAM),
            r"fc.weight has the shape \[12, 20\], must have \[12, 30\] for heads of hidden size 12 that read 3 "
            "features of a target of hidden size 10 with 23 token ids",
        ),
        (tensor("midlayer.self_attn.q_proj.weight", 24, 12), r"must have \[24, 24\]"),
        (tensor("t2d", TOKENS + 1), r"t2d has the shape \[24\], must have \[23\]"),
        (tensor("d2t", 8), r"d2t has the shape \[8\], must have \[9\]"),
        (tensor("embed_tokens.weight", TOKENS + 1, 12), r"has the shape \[24, 12\], must have \[23, 12\]"),
        (tensor("midlayer.self_attn.q_proj.bias", 24), "q_proj.bias is no part of EAGLE-3 heads of one layer"),
        (tensor("midlayer.self_attn.q_norm.weight", 6), "q_norm.weight is no part of EAGLE-3 heads"),
        (tensor("layers.1.mlp.up_proj.weight", 14, 12), "layers.1.mlp.up_proj.weight is no part of EAGLE-3 heads"),
        (tensor("layers.0.hidden_norm.weight", 12), "are the same part"),
        (
            tensor("input_norm.weight", 30),
            "input_norm.weight is unexpected: heads of this config.json have no such tensor",
        ),
        (
            tensor("fc_norm.0.weight", 10),
            "fc_norm.0.weight is unexpected: heads of this config.json have no such tensor",
        ),
        (field("fc_norm", True), r"lacks fc_norm.0.weight, of the shape \[10\]"),
        (field("norm_before_fc", True), r"lacks input_norm.weight, of the shape \[30\]"),
        (
            lambda config, _: config.update(fc_norm=True, norm_before_fc=True),
            "fc_norm is true, must be false where norm_before_fc is true",
        ),
        (field("norm_output", "yes"), 'norm_output is "yes", must be true or false'),
        (field("vocab_size", 24), "vocab_size is 24, must be 23, that of the target"),
        (field("draft_vocab_size", 24), "draft_vocab_size is 24, must be an integer from 1 to 23"),
        (field("target_hidden_size", 11), "target_hidden_size is 11, must be 10, the hidden size of the target"),
        (field("num_hidden_layers", 2), "num_hidden_layers is 2, must be 1: heads of several layers are not supported"),
        (field("hidden_act", "gelu"), 'hidden_act is "gelu", must be silu'),
        (field("hidden_size", None), "hidden_size is null, must be an integer"),
        (field("num_key_value_heads", 3), "num_key_value_heads is 3, must be a divisor of num_attention_heads, 4"),
        (field("head_dim", 7), "head_dim is 7, must be even"),
        (field("rms_norm_eps", 0), "rms_norm_eps is 0, must be above 0"),
        (field("rope_scaling", {"type": "dynamic", "factor": 2.0}), "rope_scaling is .*, must be of one of the types"),
        (field("partial_rotary_factor", 0.5), "partial_rotary_factor is 0.5, must be 1: rotary embeddings of a part"),
        (field("eagle_config", {"use_aux_hidden_state": False}), "eagle_config.use_aux_hidden_state is false, must be"),
        (
            field("eagle_config", {"eagle_aux_hidden_state_layer_ids": [2, 3, 6]}),
            r"eagle_config.eagle_aux_hidden_state_layer_ids\[2\] is 6, must be an integer from 0 to 5",
        ),
        (field("eagle_config", {"eagle_aux_hidden_state_layer_ids": []}), "must be a non-empty list of layers"),
        (field("speculators_model_type", "peagle"), 'speculators_model_type is "peagle", must be eagle3'),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, change: Change, why: str) -> None:
    """Before weights are read."""
    config, tensors = SMALL.eagle(), SMALL.tensors()
    change(config, tensors)
    with pytest.raises(ModelDirectoryError, match=why):
        Eagle3Files.of(written(tmp_path / "heads", tensors, config), TARGET)


def test_where_readers_disagree_about_a_default_it_must_be_given(tmp_path: Path) -> None:
    config = SMALL.speculators()
    del config["norm_before_residual"]
    with pytest.raises(ModelDirectoryError, match="norm_before_residual is missing, must be true or false"):
        Eagle3Files.of(written(tmp_path / "heads", SMALL.tensors("layers.0"), config), TARGET)


def test_the_default_layers_need_a_target_that_has_them(tmp_path: Path) -> None:
    folder = make_eagle3(tmp_path / "heads", replace(SMALL, layers=None))
    assert Eagle3Files.of(folder, TARGET).config.layers == (2, 3, 3)
    with pytest.raises(ModelDirectoryError, match="layer_ids is missing, must be given for a target of 2 layers"):
        Eagle3Files.of(folder, TARGET._replace(layers=2))


@pytest.mark.parametrize(
    ("named", "count", "read"),  # SpecForge names outputs, but `train-heads` for a shallow target the input 1
    [((1, 46, 90), 94, (2, 47, 91)), ((1, 3, 4), 7, (2, 4, 5)), ((2, 4, 5), 7, (2, 4, 5)), ((1, 3, 5), 6, (1, 3, 5))],
)
def test_listed_layers_name_inputs_or_outputs(named: tuple[int, ...], count: int, read: tuple[int, ...]) -> None:
    heads, target = replace(SMALL, layers=named), TARGET._replace(layers=count)
    eagle = heads.eagle()
    top_level = {**eagle, **eagle["eagle_config"], "eagle_config": None}
    for content, want in ((eagle, read), (top_level, read), (heads.speculators(), named)):
        assert Eagle3Config.of(Fields(Path("config.json"), content), target).layers == want


def test_a_list_of_outputs_must_leave_a_layer_to_enter() -> None:
    fields = Fields(Path("config.json"), replace(SMALL, layers=(1, 4, 7)).eagle())
    with pytest.raises(ModelDirectoryError, match=r"layer_ids\[2\] is 7, must be an integer from 0 to 6"):
        Eagle3Config.of(fields, TARGET._replace(layers=8))


def test_without_a_configuration_they_are_refused(tmp_path: Path) -> None:
    with pytest.raises(HeadsFilesError, match=r"has no config.json, which EAGLE-3 heads need"):
        Eagle3Files.of(written(tmp_path / "heads", SMALL.tensors()), TARGET)


@pytest.mark.parametrize("offset", [TOKENS, -TOKENS])
def test_ids_beyond_the_vocabulary_are_refused(tmp_path: Path, offset: int) -> None:
    tensors = SMALL.tensors()
    tensors["d2t"] = tensors["d2t"] + offset
    with pytest.raises(HeadsFilesError, match=r"d2t gives ids from .*, must give ids from 0 to 22"):
        loaded(written(tmp_path / "heads", tensors, SMALL.eagle()))


def test_embeddings_of_another_width_cannot_be_shared(tmp_path: Path) -> None:
    files = Eagle3Files.of(make_eagle3(tmp_path / "heads", SHARING), TARGET)
    with pytest.raises(HeadsFilesError, match=r"no embed_tokens.weight, and the target's has 9 columns, must have 10"):
        files.load(EMBEDDINGS[:, :9], target_output, "cpu", torch.float32)


def test_rotary_embeddings_that_transformers_cannot_make_are_refused(tmp_path: Path) -> None:
    rope = {"rope_parameters": {"rope_type": "yarn", "factor": "much"}}
    files = Eagle3Files.of(make_eagle3(tmp_path / "heads", replace(SMALL, rope=rope)), TARGET)
    with pytest.raises(HeadsFilesError, match=r"config.json: rotary embeddings: "):
        files.load(EMBEDDINGS, target_output, "cpu", torch.float32)


def test_the_kind_of_heads_is_found_by_their_tensors(tmp_path: Path) -> None:
    target = ModelDirectory(make("llama", tmp_path / "target"))
    eagle, medusa = make_eagle3(tmp_path / "eagle"), make_heads(tmp_path / "medusa")
    assert isinstance(read_heads(eagle, None, target).files, Eagle3Files)
    assert not isinstance(read_heads(medusa, None, target).files, Eagle3Files)
    assert kind_in(eagle / "model.safetensors") is Eagle3Files
    tree = tmp_path / "tree.json"
    tree.write_text("[[0]]")
    assert read_heads(medusa, tree, target).tree is not None
    with pytest.raises(
        ModelDirectoryError,
        match=r"tree.json: needs Medusa heads; .*eagle has eagle3 heads, which build their own trees",
    ):
        read_heads(eagle, tree, target)


def test_a_start_without_room_for_them_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for the weights, and for keys and values of every token that the target has room for."""
    target, sizes = make("llama", tmp_path / "target"), RandomEagle3()
    heads = make_eagle3(tmp_path / "heads", sizes)
    wanted = Wanted(target, Placement(kv_tokens=700))
    check(wanted, beside=partial(memory_of_heads, heads))
    monkeypatch.setattr("specdec.engine.preflight.check.free_bytes", lambda _: 600_000_000)
    numbers = sum(own.numel() for name, own in sizes.tensors().items() if name not in ("d2t", "t2d"))
    said = rf"heads heads needs {4 * numbers / 1e9:.3g} GB for weights in float32, {700 * 4 * 48 / 1e9:.3g} GB for 700 "
    with pytest.raises(UnsupportedModelError, match=said):
        check(wanted, beside=partial(memory_of_heads, heads))
    with pytest.raises(ModelDirectoryError, match="target_hidden_size is 32, must be 64"):
        check(wanted, beside=partial(memory_of_heads, make_eagle3(tmp_path / "o", RandomEagle3(stream=32))))


def test_the_cache_leaves_them_room(tmp_path: Path) -> None:
    """They are loaded after the target's KV cache, which takes a share of the free memory."""
    target = ModelDirectory(make("llama", tmp_path / "target"))
    needed = memory_of_heads(make_eagle3(tmp_path / "heads", RandomEagle3()), target, "float32", None)
    assert needed.owed == (needed.weights + needed.working, 4 * 48)
    for owed, owed_a_slot in ((1 << 50, 0), (0, 1 << 40)):
        with pytest.raises(UnsupportedModelError, match="room for a KV cache of 0 tokens"):
            load_engine(target, Placement("torch"), threads=(1,), promised=owed, promised_a_slot=owed_a_slot)


def test_heads_of_published_shapes_are_judged_by_headers(tmp_path: Path) -> None:
    """EAGLE-3 for Llama-3.1-8B: 850 MB, in a file without contents."""
    sizes = RandomEagle3(4096, 128_256, 4096, 32, 8, 128, 14_336, 32_000, layers=None, own_embeddings=False)
    target = TargetShape(4096, 128_256, 4096, 32)
    shapes = {
        "d2t": [32_000],
        "fc.weight": [4096, 12_288],
        "lm_head.weight": [32_000, 4096],
        "midlayer.hidden_norm.weight": [4096],
        "midlayer.input_layernorm.weight": [4096],
        "midlayer.mlp.down_proj.weight": [4096, 14_336],
        "midlayer.mlp.gate_proj.weight": [14_336, 4096],
        "midlayer.mlp.up_proj.weight": [14_336, 4096],
        "midlayer.post_attention_layernorm.weight": [4096],
        "midlayer.self_attn.k_proj.weight": [1024, 8192],
        "midlayer.self_attn.o_proj.weight": [4096, 4096],
        "midlayer.self_attn.q_proj.weight": [4096, 8192],
        "midlayer.self_attn.v_proj.weight": [1024, 8192],
        "norm.weight": [4096],
        "t2d": [128_256],
    }
    ends = list(accumulate(2 * math.prod(shape) for shape in shapes.values()))
    header = json.dumps(
        {
            name: {"dtype": "BF16", "shape": shape, "data_offsets": [end - 2 * math.prod(shape), end]}
            for (name, shape), end in zip(shapes.items(), ends, strict=True)
        }
    ).encode()
    (tmp_path / "config.json").write_text(json.dumps(sizes.eagle()))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + ends[-1])
    files = Eagle3Files.of(tmp_path, target)
    assert files.config.layers == (2, 16, 29)
    needed = files.memory_needed("bfloat16", 1000)
    assert needed.weights == ends[-1] - 2 * (32_000 + 128_256)  # the map stays on the host
    assert needed.kv == 1000 * 2 * 8 * 128 * 2
