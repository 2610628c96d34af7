"""Hidden states of wanted rows, and all rows' features of layers, equal those of the model's own forward pass. They
leave the logits unchanged, and the engine does not retain them.

For every architecture of `tests.models`, with ragged and with padded batches; GPUs are covered in
`gpu/test_engine.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.engine.batch import PackedBatch
from specdec.engine.engine import hidden_states, launch_of, layer_features
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.hf.hidden_states import Features, decoder_layers
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import ARCHITECTURES, VOCABULARY, make
from tests.verifier_service.fakes import TextEngine

HIDDEN = 64
"""Hidden size of all architectures."""

TOLERANCE = 1e-4
"""Error relative to the largest number. Float32 rounding is about 1e-6 of it; another layer's state differs by more
than 1e-2."""

LAYERS = (1, 0, 1)
"""Layers whose features are read; models have at least two. Heads may read layers in any order, and one twice."""

LENGTH, COMPUTED = 40, 30
TEXT = [int(token) for token in np.random.default_rng(2).integers(3, VOCABULARY, LENGTH)]
BRANCH = (TEXT[-1] + 1) % VOCABULARY
WANTED = (COMPUTED, LENGTH - 1, COMPUTED + 5)


class Oracle:
    """A model's own forward pass: its states after the last norm, and its head."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    @torch.inference_mode()
    def states(self, text: list[int]) -> NDArray[np.float32]:
        output = self.model.base_model(input_ids=torch.tensor([text]), use_cache=False)
        return np.asarray(output.last_hidden_state[0].numpy())

    @torch.inference_mode()
    def features(self, text: list[int]) -> NDArray[np.float32]:
        """Return the features [t, m, d] of LAYERS."""
        output = self.model.base_model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        return np.stack([output.hidden_states[layer][0].numpy() for layer in LAYERS], axis=1)

    @torch.inference_mode()
    def logits(self, states: NDArray[np.float32]) -> NDArray[np.float32]:
        logits = self.model.get_output_embeddings()(torch.from_numpy(states))
        cap = getattr(self.model.config, "final_logit_softcapping", None)
        return np.asarray((logits if cap is None else cap * torch.tanh(logits / cap)).numpy())


@pytest.fixture(scope="module", params=list(ARCHITECTURES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(request.param, tmp_path_factory.mktemp("models") / request.param)


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.fixture(scope="module", params=[CpuEngine, TorchEngine], ids=["ragged", "padded"])
def engine(request: pytest.FixtureRequest, directory: Path) -> TorchEngine:
    loaded: TorchEngine = request.param(ModelDirectory(directory), capacity=256, exact=False)
    return loaded


def step(engine: TorchEngine) -> PackedBatch:
    """Compute the beginning of a text, then pack its end and a branch next to its last token."""
    slots = np.arange(1, LENGTH + 2)
    packer = engine.packer()
    rows = packer.add_rows(TEXT[:COMPUTED], 0, slots[:COMPUTED])
    packer.add_path(slots[:COMPUTED], rows)
    engine.forward(packer.pack())
    packer = engine.packer()
    rows = packer.add_rows(TEXT[COMPUTED:], COMPUTED, slots[COMPUTED:LENGTH])
    packer.add_path(slots[:LENGTH], rows)
    side = packer.add_row(BRANCH, LENGTH - 1, LENGTH + 1)
    packer.add_path(np.append(slots[: LENGTH - 1], LENGTH + 1), [side])
    for position in WANTED:
        packer.want(rows[position - COMPUTED])
    packer.want(side)
    return packer.pack()


def close(got: NDArray[np.float32], want: NDArray[np.float32]) -> bool:
    return bool(np.abs(got - want).max() < TOLERANCE * np.abs(want).max())


def test_they_are_the_model_s_own(engine: TorchEngine, oracle: Oracle) -> None:
    _, hidden = hidden_states(engine).forward_hidden(step(engine))
    assert engine.hidden_size == HIDDEN
    assert hidden.shape == (len(WANTED) + 1, HIDDEN)
    assert hidden.dtype == np.float32
    assert close(hidden[:-1], oracle.states(TEXT)[list(WANTED)])
    assert close(hidden[-1], oracle.states([*TEXT[:-1], BRANCH])[-1])


def test_features_are_the_model_s_own_of_all_rows(engine: TorchEngine, oracle: Oracle) -> None:
    count = LENGTH - COMPUTED
    _, features = layer_features(engine).forward_features(step(engine), LAYERS)
    assert features.dtype == np.float32
    assert close(features[:count], oracle.features(TEXT)[COMPUTED:])
    assert close(features[count], oracle.features([*TEXT[:-1], BRANCH])[-1])


def test_the_number_after_the_last_layer_s_stands_for_hidden_states(engine: TorchEngine, oracle: Oracle) -> None:
    """They are of all rows, and may come beside features of layers."""
    last, count = engine.layer_count(), LENGTH - COMPUTED
    _, features = engine.forward_features(step(engine), (last, 1))
    assert close(features[:count, 0], oracle.states(TEXT)[COMPUTED:])
    assert close(features[:count, 1], oracle.features(TEXT)[COMPUTED:, 0])
    _, hidden = engine.forward_hidden(step(engine))
    rows = [*(position - COMPUTED for position in WANTED), count]
    assert np.array_equal(features[rows, 0], hidden)


def test_layers_and_embeddings_are_the_model_s(engine: TorchEngine, oracle: Oracle) -> None:
    assert engine.layer_count() == len(decoder_layers(oracle.model)) == oracle.model.config.num_hidden_layers
    assert torch.equal(engine.token_embeddings(), oracle.model.get_input_embeddings().weight.detach())


def test_they_are_what_the_head_reads(engine: TorchEngine, oracle: Oracle) -> None:
    logits, hidden = engine.forward_hidden(step(engine))
    assert close(logits, oracle.logits(hidden))


def test_a_launched_pass_has_them_by_row(engine: TorchEngine) -> None:
    logits, hidden = engine.forward_hidden(step(engine))
    rows = launch_of(engine, hidden=True)(step(engine)).logits(dict)
    assert np.array_equal(rows.hidden([2, 0]), hidden[[2, 0]])
    _, sound = rows.choose([0], [SamplingQuery(RequestSampler(Sampling()), 0)])
    assert sound.all()
    head = engine.output_head(torch.from_numpy(hidden).to(engine.model.dtype))
    assert np.array_equal(np.argmax(head.float().numpy(), axis=1), np.argmax(logits, axis=1))


def test_a_launched_pass_has_features_by_row(engine: TorchEngine) -> None:
    _, features = engine.forward_features(step(engine), LAYERS)
    rows = launch_of(engine, features=LAYERS)(step(engine)).logits(dict)
    of_wanted = [*(position - COMPUTED for position in WANTED), LENGTH - COMPUTED]
    assert np.array_equal(rows.features([3, 0]), features[[of_wanted[3], of_wanted[0]]])
    assert np.array_equal(rows.features([1], [3, 0]), features[[of_wanted[1], 3, 0]])
    assert np.array_equal(rows.features([], [2]), features[[2]])


def test_logits_have_the_same_bits(engine: TorchEngine) -> None:
    before = engine.forward(step(engine))
    logits, _ = engine.forward_hidden(step(engine))
    assert np.array_equal(logits, before)
    logits, _ = engine.forward_features(step(engine), LAYERS)
    assert np.array_equal(logits, before)
    assert np.array_equal(logits, engine.forward(step(engine)))


def test_the_next_step_leaves_them_alone(engine: TorchEngine) -> None:
    """They are not views of memory shared by steps."""
    _, hidden = engine.forward_hidden(step(engine))
    _, features = engine.forward_features(step(engine), LAYERS)
    kept, kept_features = hidden.copy(), features.copy()
    packer = engine.packer()
    packer.add_path(np.arange(1, 9), packer.add_rows([9] * 8, 0, np.arange(1, 9)))
    packer.want(0)
    engine.forward(packer.pack())
    assert np.array_equal(hidden, kept)
    assert np.array_equal(features, kept_features)


def test_who_does_not_ask_has_nothing_done(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    head: Any = engine.model.get_output_embeddings()
    engine.forward_hidden(step(engine))
    hooks: list[int] = []
    forward = type(head).forward

    def noted(module: torch.nn.Module, hidden: torch.Tensor) -> Any:
        hooks.append(len(module._forward_pre_hooks))
        return forward(module, hidden)

    monkeypatch.setattr(type(head), "forward", noted)
    engine.forward(step(engine))
    assert set(hooks) == {0}


def test_a_pass_that_fails_leaves_no_hook(engine: TorchEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    head: Any = engine.model.get_output_embeddings()

    def failing(*_: Any) -> Any:
        raise RuntimeError("out of memory")

    batch = step(engine)
    with monkeypatch.context() as patched:
        patched.setattr(type(head), "forward", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward_hidden(batch)
        with pytest.raises(RuntimeError, match="out of memory"):
            engine.forward_features(batch, (*LAYERS, engine.layer_count()))
    assert not head._forward_pre_hooks
    assert not any(layer._forward_pre_hooks for layer in decoder_layers(engine.model))
    assert not engine.model.get_decoder()._forward_hooks


def test_where_tiles_make_rows_exact_too(tmp_path: Path) -> None:
    """A narrower dtype's numbers convert to float32 exactly."""
    directory = ModelDirectory(make("qwen3", tmp_path))
    engine = CpuEngine(directory, capacity=1024, dtype="bfloat16")
    logits, hidden = engine.forward_hidden(step(engine))
    assert np.array_equal(logits, engine.forward(step(engine)))
    assert len(hidden) == len(logits)  # padding aside
    assert torch.equal(torch.from_numpy(hidden).bfloat16().float(), torch.from_numpy(hidden))
    want = Oracle(directory.path).states(TEXT)[list(WANTED)]
    assert np.abs(hidden[: len(WANTED)] - want).max() < 0.1 * np.abs(want).max()
    logits, features = engine.forward_features(step(engine), LAYERS)
    assert np.array_equal(logits, engine.forward(step(engine)))
    assert torch.equal(torch.from_numpy(features).bfloat16().float(), torch.from_numpy(features))
    want = Oracle(directory.path).features(TEXT)[COMPUTED:]
    assert np.abs(features[: len(want)] - want).max() < 0.1 * np.abs(want).max()


@pytest.mark.parametrize("bits", [None, 8])
def test_every_choice_of_layers_leaves_the_bits_of_logits(tmp_path: Path, bits: int | None) -> None:
    """In compiled layers, and in interpreted ones with quantised weights."""
    directory = ModelDirectory(make("llama", tmp_path, num_hidden_layers=4))
    engine = CpuEngine(directory, capacity=1024, exact=bits is not None, bits=bits)
    want = engine.forward(step(engine))
    for layers in ((0,), (3,), (0, 1, 2, 3), (2, 2, 1), (4,), (4, 0)):
        logits, features = engine.forward_features(step(engine), layers)
        assert np.array_equal(logits, want)
        assert features.shape[1:] == (len(layers), engine.hidden_size)
        for place, layer in enumerate(layers):
            _, alone = engine.forward_features(step(engine), (layer,))
            assert np.array_equal(features[:, place], alone[:, 0])


def test_a_model_without_a_list_of_layers_is_refused() -> None:
    class Model(torch.nn.Module):
        class Config:
            num_hidden_layers = 3

            def get_text_config(self) -> Any:
                return self

        config = Config()

    model: Any = Model()
    with pytest.raises(UnsupportedModelError, match=r"^Model does not keep its 3 decoder layers in one list"):
        decoder_layers(model)
    with pytest.raises(UnsupportedModelError, match=r"^Model does not keep"), Features((0,)).of(model):
        pass


def test_an_engine_without_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^TextEngine returns no hidden states"):
        hidden_states(TextEngine(4))
    with pytest.raises(
        UnsupportedModelError, match=r"^TextEngine does not return the inputs of its layers, .*; use --engine torch"
    ):
        layer_features(TextEngine(4))
