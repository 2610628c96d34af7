"""The GPU engine computes the model's logits and makes the host's choices. Without a GPU it runs under Triton's
interpreter, without graphs; batch independence is checked kernel by kernel there (`test_attention.py`), since the check
of a whole engine would take the interpreter minutes."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, LagunaConfig, LagunaForCausalLM

from specdec.decoding.draft_logits import shortlists
from specdec.decoding.query import RequestSampler, SamplingQuery
from specdec.decoding.sampling import Sampling
from specdec.decoding.step_logits import HostLogits
from specdec.engine.batch import Packer
from specdec.engine.engine import GpuSampling, Placed, Shortlisting, hidden_states, launch_of, layer_features
from specdec.engine.gpu import engine as gpu_engine
from specdec.engine.gpu.engine import GpuEngine
from specdec.engine.gpu.linear import SplitKLinear, split_k
from specdec.engine.hf.pretrained import attention_of, load
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.shortage import is_shortage
from tests.models import VOCABULARY, make, save

GREEDY = SamplingQuery(RequestSampler(Sampling()), 0)

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"


class Subject:
    def __init__(self, name: str, directory: Path, **options: Any) -> None:
        path = make(name, directory / name)
        usual: dict[str, Any] = {"capacity": 700, "dtype": "float32", "device": DEVICE, "exact": ON_GPU}
        self.engine = GpuEngine(ModelDirectory(path), **usual | options)
        own: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
        self._own = own.eval()

    @torch.inference_mode()
    def own_hidden(self, text: list[int]) -> np.ndarray[Any, Any]:
        states = self._own.base_model(input_ids=torch.tensor([text]), use_cache=False).last_hidden_state
        return np.asarray(states[0, -1].numpy())

    @torch.inference_mode()
    def own_features(self, text: list[int], layers: tuple[int, ...]) -> np.ndarray[Any, Any]:
        output = self._own.base_model(input_ids=torch.tensor([text]), use_cache=False, output_hidden_states=True)
        return np.stack([output.hidden_states[layer][0, -1].numpy() for layer in layers])

    @torch.inference_mode()
    def own_logits(self, text: list[int]) -> np.ndarray[Any, Any]:
        return np.asarray(self._own(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].numpy())


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """One model whose layers run as kernels, and one that runs its own layers, with windows and caps."""
    return Subject(request.param, tmp_path_factory.mktemp("models"))


interpreted_later = [] if ON_GPU else [pytest.mark.verify]
"""Marks of tests that take the interpreter long and run code that other tests run as well."""

whatever_the_layers = pytest.mark.parametrize(
    "subject", ["llama", pytest.param("gemma2", marks=interpreted_later)], indirect=True
)
"""For code after the layers, which is the same for all models."""


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=interpreted_later)])
def test_a_layer_may_have_more_heads_than_the_configuration_says(whole: bool, tmp_path: Path) -> None:
    config = LagunaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_attention_heads_per_layer=[2, 4],
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=96,
        mlp_layer_types=["dense"] * 2,
        max_position_embeddings=256,
    )
    directory = ModelDirectory(save(LagunaForCausalLM(config), tmp_path))
    assert [layer.heads for layer in attention_of(load(directory, torch.float32, "cpu"))] == [2, 4]
    if whole:
        GpuEngine(directory, capacity=700, dtype="float32", device=DEVICE, exact=False)


TEXT = np.random.default_rng(4).integers(3, VOCABULARY, 8).tolist()
BRANCH = [7, 9]


@pytest.fixture(scope="module")
def logits(subject: Subject) -> NDArray[np.float32]:
    """Logits of the text and its branch."""
    packer, _ = branched(subject.engine, TEXT, BRANCH)
    return subject.engine.forward(packer.pack()).copy()


@pytest.fixture(scope="module")
def hidden(subject: Subject) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Logits and hidden states of the same rows, from one pass."""
    packer, _ = branched(subject.engine, TEXT, BRANCH)
    beside, found = hidden_states(subject.engine).forward_hidden(packer.pack())
    return beside.copy(), found.copy()


def branched(engine: GpuEngine, text: list[int], branch: list[int]) -> tuple[Packer, list[list[int]]]:
    """Pack a text as a prompt, and a branch next to its last token; return also the texts of the logit rows."""
    length = len(text)
    slots = np.arange(1, length + len(branch) + 1)
    packer = engine.packer()
    rows = packer.add_rows(text, 0, slots[:length])
    packer.add_path(slots[:length], list(rows))
    side = packer.add_rows(branch, length - 1, slots[length:])
    packer.add_path(np.concatenate([slots[: length - 1], slots[length:]]), list(side))
    for row in (rows[-2], rows[-1], *side):
        packer.want(row)
    return packer, [text[:-1], text, *(text[:-1] + branch[: n + 1] for n in range(len(branch)))]


def test_logits_are_the_model_s_own(subject: Subject, logits: NDArray[np.float32]) -> None:
    _, texts = branched(subject.engine, TEXT, BRANCH)
    for row, spelt in zip(logits, texts, strict=False):
        want = subject.own_logits(spelt)
        assert np.abs(row - want).max() < 1e-4 * np.abs(want).max()


def test_hidden_states_are_the_model_s_own_beside_the_same_logits(
    subject: Subject, logits: NDArray[np.float32], hidden: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> None:
    _, texts = branched(subject.engine, TEXT, BRANCH)
    beside, states = hidden
    assert np.array_equal(beside, logits)
    assert states.shape == (len(logits), hidden_states(subject.engine).hidden_size)
    assert states.dtype == np.float32
    for row, spelt in zip(states, texts, strict=False):
        want = subject.own_hidden(spelt)
        assert np.abs(row - want).max() < 1e-4 * np.abs(want).max()


@whatever_the_layers
def test_a_launched_pass_keeps_hidden_states_on_the_device(
    subject: Subject, hidden: tuple[NDArray[np.float32], NDArray[np.float32]]
) -> None:
    _, want = hidden
    packer, _ = branched(subject.engine, TEXT, BRANCH)
    rows = launch_of(subject.engine, hidden=True)(packer.pack()).logits(dict)
    kept = rows.hidden([2, 0])
    assert isinstance(kept, torch.Tensor)
    assert np.array_equal(kept.float().cpu().numpy(), want[[2, 0]])
    logits = hidden_states(subject.engine).output_head(kept)
    assert torch.equal(logits.argmax(1).cpu(), torch.tensor(rows.choose([2, 0], [GREEDY, GREEDY])[0]))


def test_features_are_the_model_s_own_beside_the_same_logits(subject: Subject, logits: NDArray[np.float32]) -> None:
    """Features are of all rows, with layers in the requested order, and may include the last states. A launched pass
    keeps them on the device."""
    engine = layer_features(subject.engine)
    layers = 1, 0, engine.layer_count()
    batch = branched(subject.engine, TEXT, BRANCH)[0].pack()
    beside, features = engine.forward_features(batch, layers)
    assert np.array_equal(beside, logits)
    assert features.dtype == np.float32
    for row, spelt in [(len(TEXT) - 1, TEXT), (len(TEXT) + 1, [*TEXT[:-1], *BRANCH])]:
        want = subject.own_features(spelt, layers)
        assert np.abs(features[row] - want).max() < 1e-4 * np.abs(want).max()
    rows = launch_of(subject.engine, features=layers)(branched(subject.engine, TEXT, BRANCH)[0].pack()).logits(dict)
    kept = rows.features([3, 0], [2])
    assert isinstance(kept, torch.Tensor)
    assert np.array_equal(kept.float().cpu().numpy(), features[[*batch.wanted[[3, 0]], 2]])
    assert engine.token_embeddings().shape == (VOCABULARY, hidden_states(subject.engine).hidden_size)


@whatever_the_layers
def test_what_was_computed_is_read_again_where_it_was_copied(subject: Subject) -> None:
    text = np.random.default_rng(1).integers(3, VOCABULARY, 9).tolist()
    packer, _ = branched(subject.engine, text, [5])
    subject.engine.forward(packer.pack())
    new = np.arange(300, 300 + len(text))
    subject.engine.copy(np.arange(1, 1 + len(text)), new)
    packer = subject.engine.packer()
    row = packer.add_row(11, len(text), 400)
    packer.add_path(np.append(new, 400), [row])
    packer.want(row)
    want = subject.own_logits([*text, 11])
    assert np.abs(subject.engine.forward(packer.pack())[0] - want).max() < 1e-4 * np.abs(want).max()


@whatever_the_layers
def test_a_step_chooses_as_from_logits_in_memory(subject: Subject) -> None:
    engine = subject.engine
    assert isinstance(engine, GpuSampling)
    text = np.random.default_rng(2).integers(3, VOCABULARY, 6).tolist()
    samplings = [Sampling(), Sampling(temperature=1.0, seed=3), Sampling(temperature=0.7, top_p=0.8, seed=4)]
    queries = [SamplingQuery(RequestSampler(samplings[row % 3]), len(text) + row // 2) for row in range(4)]
    packer, _ = branched(engine, text, [6, 8])
    want, _ = HostLogits(engine.forward(packer.pack())).choose(range(4), queries)
    packer, _ = branched(engine, text, [6, 8])
    got, sound = engine.launch(packer.pack()).logits(lambda: dict(enumerate(queries))).choose(range(4), queries)
    assert got.tolist() == want.tolist()
    assert sound.all()


@whatever_the_layers
def test_a_draft_s_pass_has_the_shortlists_of_its_logits(subject: Subject, logits: NDArray[np.float32]) -> None:
    engine = subject.engine
    assert isinstance(engine, Shortlisting)
    packer, _ = branched(engine, TEXT, BRANCH)
    got, rows = engine.forward_shortlists(packer.pack()), [3, 0]
    want = shortlists([logits[row] for row in rows])
    np.testing.assert_array_equal(got.shortlists(rows).values, want.values)
    np.testing.assert_array_equal(got.shortlists(rows).ids, want.ids)
    np.testing.assert_array_equal(got.whole(rows), logits[rows])
    packer = engine.packer()
    packer.add_path(np.arange(1, 4), packer.add_rows([5, 6, 7], 0, [1, 2, 3]))
    assert not engine.forward_shortlists(packer.pack()).whole([])  # a chunk of a prompt has no logits


def test_it_says_where_it_computes(subject: Subject) -> None:
    engine = subject.engine
    assert isinstance(engine, Placed)
    assert (engine.device, engine.dtype, engine.threads) == (DEVICE, "float32", ())


@pytest.mark.gpu
def test_rows_do_not_depend_on_their_batch(subject: Subject) -> None:
    assert subject.engine.exact


def test_steps_survive_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of several sizes alternate, each a graph if there is a GPU, except the largest ones, whose rows attend in
    waves."""
    monkeypatch.setattr(gpu_engine, "partials_for", lambda longest: 16)
    subject = Subject("llama", tmp_path)
    text = np.random.default_rng(3).integers(3, VOCABULARY, 250).tolist()
    for length in (3, 40, 3, 250, 40, 3) if ON_GPU else (3,):
        packer, texts = branched(subject.engine, text[:length], [6, 8])
        for row, spelt in zip(subject.engine.forward(packer.pack()), texts, strict=False):
            want = subject.own_logits(spelt)
            assert np.abs(row - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.gpu
def test_steps_as_graphs_are_steps_kernel_by_kernel(tmp_path: Path) -> None:
    """Bit by bit, with and without hidden states or features, in consecutive batches of equal size."""
    graphed, eager = Subject("llama", tmp_path).engine, Subject("llama", tmp_path, cuda_graphs=False).engine
    for seed in range(3):
        text = np.random.default_rng(seed).integers(3, VOCABULARY, 12).tolist()
        for run in ("forward", "forward_hidden"):
            got, want = (getattr(each, run)(branched(each, text, [7, 9])[0].pack()) for each in (graphed, eager))
            for a, b in zip(got, want, strict=True):
                assert np.array_equal(a, b), (seed, run)
        got, want = (
            each.forward_features(branched(each, text, [7, 9])[0].pack(), (0, 1, 2)) for each in (graphed, eager)
        )
        for a, b in zip(got, want, strict=True):
            assert np.array_equal(a, b), (seed, "features")


@pytest.mark.gpu
def test_a_step_that_finds_no_memory_is_a_shortage_and_harms_no_other(tmp_path: Path) -> None:
    """A step of a new size: memory runs out while its graph is recorded."""
    engine = Subject("llama", tmp_path).engine
    text = np.random.default_rng(5).integers(3, VOCABULARY, 200).tolist()

    def logits(length: int) -> NDArray[np.float32]:
        return engine.forward(branched(engine, text[:length], [6, 8])[0].pack())

    want = logits(3)
    filler = []
    for size in (1 << 30, 1 << 20, 1 << 12, 1 << 9):  # down to the smallest piece that torch allocates
        with contextlib.suppress(torch.OutOfMemoryError):
            while True:
                filler.append(torch.empty(size, dtype=torch.uint8, device=DEVICE))
    with pytest.raises(torch.OutOfMemoryError) as error:
        logits(200)
    assert is_shortage(error.value)
    filler.clear()
    torch.cuda.empty_cache()
    assert np.array_equal(logits(3), want)
    own = Subject("llama", tmp_path).own_logits(text)
    assert np.abs(logits(200)[1] - own).max() < 1e-4 * np.abs(own).max()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is no second GPU")
def test_the_second_gpu_of_a_machine(tmp_path: Path) -> None:
    """In a thread whose current device is the first, the default for new threads."""
    subject = Subject("llama", tmp_path, device="cuda:1")
    packer, texts = branched(subject.engine, [5, 6, 7], [8])
    want = subject.own_logits(texts[1])
    assert np.abs(subject.engine.forward(packer.pack())[1] - want).max() < 1e-4 * np.abs(want).max()


@pytest.mark.verify
def test_layers_whose_sums_are_cut_within_an_engine(tmp_path: Path) -> None:
    """They replace all products of a bfloat16 model, in steps of several sizes; the longest is a prompt with few wanted
    rows. Steps as graphs, if any, have the same bits as kernel by kernel."""
    graphed, eager = (
        Subject("llama", tmp_path, dtype="bfloat16", exact=False, cuda_graphs=graphs) for graphs in (True, False)
    )
    for engine in (graphed.engine, eager.engine):
        for module in list(engine.model.modules()):
            for name, child in list(module.named_children()):
                if (other := split_k(child)) is not None:
                    setattr(module, name, other)
        engine.tile(None)
        assert sum(isinstance(each, SplitKLinear) for each in engine.model.modules()) >= 4
    for length in (3, 250, 40, 3) if ON_GPU else (3,):
        text = np.random.default_rng(length).integers(3, VOCABULARY, length).tolist()
        got, want = (each.engine.forward(branched(each.engine, text, [7, 9])[0].pack()) for each in (graphed, eager))
        assert np.array_equal(got, want)
        own = graphed.own_logits(text)
        assert np.abs(got[1] - own).max() < 0.1 * np.abs(own).max()
