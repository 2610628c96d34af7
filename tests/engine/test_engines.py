"""The engines' logits match the model's own forward pass in every batch.

For every architecture of `tests.models`, in float32, on torch with ragged and with padded batches and on the exported
ONNX graph: sessions of different lengths prefilled in chunks and stepped in one batch, a block rolled back and
rewritten, a branching tree as paths and as one masked lane, rows of memory copied, texts far longer than the sliding
window. Every logit row is compared with the model's own transformers forward pass over that text alone. Then
unsupported models: refused on loading, by the right exception, with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.torch
import torch
import transformers
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM, PreTrainedModel

from specdec.engine.engine import Engine, Placed, UnsupportedModelError, cpu_threads, hidden_states
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.loading import load_engine
from specdec.engine.engines.torch_engine import TorchEngine
from specdec.engine.hf.pretrained import attention_of
from specdec.engine.kv.slots import KVPool, Slots
from specdec.engine.model_directory import COPY_GRAPH, DESCRIPTION, GRAPH, ModelDirectory, ModelDirectoryError
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import copy_graph, export
from specdec.engine.onnx.first_use import exported
from specdec.engine.padded.backend import PaddedBackend
from specdec.engine.placement import Placement
from tests.captured_logs import captured_logs
from tests.models import ARCHITECTURES, END, VOCABULARY, WINDOW, make, save

CAPACITY = 512
TOLERANCE = 1e-4
"""Relative to the largest logit. Float32 rounding is about 1e-6 of it, a wrong key more than 1e-2."""

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

StepLogits = NDArray[np.float32]
Text = list[int]


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small matrices on a shared machine: more threads only contend."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class Oracle:
    """A model's own forward pass over one text."""

    def __init__(self, directory: Path) -> None:
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self.model: PreTrainedModel = model.eval()

    @torch.inference_mode()
    def logits(self, text: Text) -> StepLogits:
        """[len(text), vocabulary]."""
        return np.asarray(self.model(input_ids=torch.tensor([text]), use_cache=False).logits[0].numpy())


@dataclass
class Subject:
    """An engine under test, the slots of its memory, and its oracle."""

    engine: Engine
    oracle: Oracle
    pool: KVPool = field(default_factory=lambda: KVPool(CAPACITY))


@pytest.fixture(scope="session", params=list(ARCHITECTURES))
def model(request: pytest.FixtureRequest, workshop: Path) -> Path:
    """A saved model of each architecture."""
    return make(request.param, workshop / request.param)


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)


@pytest.fixture(scope="session")
def torch_engine(model: Path) -> CpuEngine:
    return CpuEngine(ModelDirectory(model), capacity=CAPACITY)


@pytest.fixture(scope="session")
def padded_engine(model: Path) -> CpuEngine:
    """As on devices other than the CPU: attention by tensor operations with masks; and not exact."""
    return CpuEngine(ModelDirectory(model), capacity=CAPACITY, exact=False, backend=PaddedBackend)


@pytest.fixture(scope="session")
def onnx_directory(model: Path) -> Path:
    """The model exported over an older export."""
    target = model.with_name(f"{model.name}-onnx")
    target.mkdir()
    (target / "old").touch()
    (target / DESCRIPTION).touch()
    export(ModelDirectory(model), target)
    return target


@pytest.fixture(scope="session")
def onnx_engine(onnx_directory: Path) -> OnnxEngine:
    return OnnxEngine(ModelDirectory(onnx_directory), capacity=CAPACITY, threads=1)


def test_engines_say_where_they_compute(torch_engine: CpuEngine, onnx_engine: OnnxEngine) -> None:
    for engine in (torch_engine, onnx_engine):
        assert isinstance(engine, Placed)
        assert (engine.device, engine.dtype, engine.threads) == ("cpu", "float32", (1,))


def test_an_onnx_session_keeps_the_fewest_threads(onnx_directory: Path) -> None:
    engine = load_engine(ModelDirectory(onnx_directory), Placement("onnx", kv_tokens=CAPACITY), threads=(2, 1))
    assert engine.numerics.endswith("/threads-1")
    assert cpu_threads(engine) is None


def test_an_exported_graph_gives_no_hidden_states(onnx_engine: OnnxEngine) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^OnnxEngine returns no hidden states with logits"):
        hidden_states(onnx_engine)


@pytest.fixture(params=["torch", "padded", "onnx"])
def subject(request: pytest.FixtureRequest, oracle: Oracle) -> Subject:
    """Each engine in turn, with an empty pool over a memory with leftovers of earlier tests."""
    return Subject(request.getfixturevalue(f"{request.param}_engine"), oracle)


class Step:
    """One forward pass, with each wanted row compared with the oracle."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.packer = subject.engine.packer()
        self.texts: list[Text] = []

    def want(self, row: int, text: Text) -> None:
        """Request the logits of `row`, expected to be those after `text`."""
        self.packer.want(row)
        self.texts.append(list(text))

    def run(self) -> None:
        got = self.subject.engine.forward(self.packer.pack())
        assert got.dtype == np.float32
        assert got.shape == (len(self.texts), VOCABULARY)
        for row, text in zip(got, self.texts, strict=True):
            want = self.subject.oracle.logits(text)[-1]
            difference = float(np.abs(row - want).max() / np.abs(want).max())
            assert difference < TOLERANCE, f"off by {difference:.2g} of the largest logit after {len(text)} tokens"


class Session:
    """A text with its first `done` tokens computed, on its own slots."""

    def __init__(self, subject: Subject, text: Text) -> None:
        self.subject = subject
        self.text = list(text)
        self.slots: Slots = np.array([], dtype=np.int64)

    @property
    def done(self) -> int:
        return len(self.slots)

    def compute(self, step: Step, most: int | None = None) -> None:
        """Put the next tokens into the step and want the logits of the first and the last of them."""
        new = self.text[self.done :][:most]
        if not new:
            return
        first = self.done
        self.slots = np.concatenate([self.slots, self.subject.pool.take(len(new))])
        rows = step.packer.add_rows(new, first, self.slots[first:])
        step.packer.add_path(self.slots, rows)
        for row in {rows[0], rows[-1]}:
            step.want(row, self.text[: first + 1 + row - rows[0]])

    def roll_back(self, length: int) -> None:
        """Drop everything beyond `length`; the slots' next owner overwrites them."""
        self.subject.pool.give(self.slots[length:])
        self.slots = self.slots[:length]
        del self.text[length:]


class Tree:
    """Eight guessed tokens below the text of a session, on tree slots, as rows of one step.

    . -> 0 -> 2 -> 4 -> 5
           |         `> 7
           `> 3
      `> 1 -> 6
    """

    PARENTS = (None, None, 0, 0, 2, 4, 1, 4)
    LEAVES = (3, 5, 6, 7)

    def __init__(self, session: Session, step: Step) -> None:
        self.session = session
        self.tokens = words(7, len(self.PARENTS))
        self.slots = session.subject.pool.take(len(self.PARENTS))[::-1].copy()
        self.rows = []
        for node, token in enumerate(self.tokens):
            path = self.path(node)
            self.rows.append(step.packer.add_row(token, session.done + len(path) - 1, int(self.slots[node])))
            step.want(self.rows[node], session.text + [self.tokens[i] for i in path])

    def path(self, node: int) -> list[int]:
        """Return the nodes from below the text down to this one."""
        parent = self.PARENTS[node]
        return [node] if parent is None else [*self.path(parent), node]

    def as_paths(self, step: Step) -> None:
        """A lane for each leaf: inner nodes are in several."""
        for leaf in self.LEAVES:
            path = self.path(leaf)
            keys = np.concatenate([self.session.slots, self.slots[path]])
            step.packer.add_path(keys, [self.rows[node] for node in path])

    def as_masked_lane(self, step: Step) -> None:
        paths = [self.path(node) for node in range(len(self.PARENTS))]
        done = self.session.done
        visible = np.zeros((len(paths), done + len(paths)), dtype=bool)
        visible[:, :done] = True
        for node, path in enumerate(paths):
            visible[node, [done + i for i in path]] = True
        depths = [done + len(path) - 1 for path in paths]
        keys = np.concatenate([self.session.slots, self.slots])
        step.packer.add_tree(keys, np.array([*range(done), *depths]), self.rows, visible)


def words(seed: int, count: int) -> Text:
    """Return random tokens, none of them special."""
    return [int(token) for token in np.random.default_rng(seed).integers(END + 1, VOCABULARY, count)]


def last_logits(engine: Engine, text: Text) -> StepLogits:
    """Return the logits of a text as one prompt, on the first slots."""
    packer = engine.packer()
    slots = np.arange(1, len(text) + 1)
    rows = packer.add_rows(text, 0, slots)
    packer.add_path(slots, rows)
    packer.want(rows[-1])
    got = engine.forward(packer.pack())[0]  # padding repeats it
    return np.asarray(got)


def prefilled(subject: Subject, text: Text) -> Session:
    session = Session(subject, text)
    step = Step(subject)
    session.compute(step)
    step.run()
    return session


class TestReferenceForward:
    """Both engines agree with the model's own forward pass."""

    def test_sessions_of_different_lengths_in_chunks_and_steps(self, subject: Subject) -> None:
        """Up to 144 tokens: nine windows and three key buckets. One session ends midway, and a new one takes its slots
        and others, in chunks."""
        sessions = [Session(subject, words(i, length)) for i, length in enumerate((3, 40, 90, 140))]
        while any(session.done < len(session.text) for session in sessions):
            step = Step(subject)
            for session in sessions:
                session.compute(step, 37)
            step.run()
        sessions.pop(1).roll_back(0)
        late = Session(subject, words(9, 70))
        for i in range(4):
            step = Step(subject)
            for session in sessions:
                session.text += words(10 + i, 1)
                session.compute(step)
            late.compute(step, 30)
            step.run()
        assert late.done == 70
        assert (np.diff(late.slots) != 1).any()

    def test_one_token_alone(self, subject: Subject) -> None:
        """The smallest possible batch, and the steps after it."""
        session = Session(subject, words(1, 1))
        for i in range(3):
            step = Step(subject)
            session.compute(step)
            step.run()
            session.text += words(20 + i, 1)

    def test_a_batch_may_want_no_logits(self, subject: Subject) -> None:
        """Like the early chunks of a prompt."""
        text = words(2, 20)
        slots = subject.pool.take(20)
        packer = subject.engine.packer()
        packer.add_path(slots, packer.add_rows(text[:12], 0, slots[:12]))
        assert subject.engine.forward(packer.pack()).shape[1] == VOCABULARY  # no rows, padding aside
        step = Step(subject)
        rows = step.packer.add_rows(text[12:], 12, slots[12:])
        step.packer.add_path(slots, rows)
        step.want(rows[-1], text)
        step.run()

    def test_wanted_rows_come_in_the_order_asked(self, subject: Subject) -> None:
        text = words(3, 30)
        slots = subject.pool.take(30)
        step = Step(subject)
        rows = step.packer.add_rows(text, 0, slots)
        step.packer.add_path(slots, rows)
        for i in (29, 0, 7, 7, 20):
            step.want(rows[i], text[: i + 1])
        step.run()

    def test_a_block_rolled_back(self, subject: Subject) -> None:
        """Three guesses of six tokens, two of them right; a neighbour takes the slots of the rest."""
        session = prefilled(subject, words(4, 50))
        neighbour = prefilled(subject, words(5, 20))
        for i in range(3):
            session.text += words(30 + i, 6)
            neighbour.text += words(40 + i, 2)
            step = Step(subject)
            neighbour.compute(step)
            session.compute(step)
            step.run()
            session.roll_back(len(session.text) - 4)

    @pytest.mark.parametrize("layout", [Tree.as_paths, Tree.as_masked_lane], ids=["paths", "masked"])
    def test_a_tree_is_verified_copied_out_and_continued(
        self, subject: Subject, layout: Callable[[Tree, Step], None]
    ) -> None:
        """Next to a plain step of a neighbour, across a key bucket. Then one path is accepted: its rows are copied to
        slots of the session, the tree slots go to the neighbour, and both continue."""
        session = prefilled(subject, words(6, 61))
        neighbour = prefilled(subject, words(8, 25))
        session.text += words(50, 1)  # the tip
        neighbour.text += words(51, 1)
        step = Step(subject)
        neighbour.compute(step)
        session.compute(step)
        tree = Tree(session, step)
        layout(tree, step)
        step.run()

        accepted = tree.path(7)
        kept = subject.pool.take(len(accepted))
        subject.engine.copy(tree.slots[accepted], kept)
        subject.pool.give(tree.slots)
        session.slots = np.concatenate([session.slots, kept])
        session.text += [tree.tokens[node] for node in accepted]
        for i in range(2):
            session.text += words(60 + i, 2)
            neighbour.text += words(70 + i, 6)
            step = Step(subject)
            neighbour.compute(step)
            session.compute(step)
            step.run()

    def test_a_copy_onto_itself_shifts(self, subject: Subject) -> None:
        """Source and target may overlap."""
        session = prefilled(subject, words(11, 20))
        (extra,) = subject.pool.take(1)
        shifted = np.array([*session.slots[1:], extra])
        subject.engine.copy(session.slots, shifted)
        session.slots = shifted
        session.text += words(12, 3)
        step = Step(subject)
        session.compute(step)
        step.run()


class TestExport:
    def test_the_target_holds_the_export_and_nothing_else(self, model: Path, onnx_directory: Path) -> None:
        """Configuration and tokenizer are copied; earlier content and partial work are removed."""
        found = {file.name for file in onnx_directory.iterdir()}
        assert found >= {GRAPH, DESCRIPTION, "config.json", "tokenizer.json", "tokenizer_config.json"}
        assert "old" not in found
        assert not list(onnx_directory.parent.glob("*partial*"))
        source, target = ModelDirectory(model), ModelDirectory(onnx_directory)
        assert target.tokenizer_fingerprint == source.tokenizer_fingerprint
        assert target.end_tokens == source.end_tokens == {END}
        assert exported(target) == onnx_directory

    def test_both_engines_look_back_equally_far(self, torch_engine: CpuEngine, onnx_engine: OnnxEngine) -> None:
        windowed = type(torch_engine.model).__name__.startswith(("Mistral", "Gemma"))
        backend = PaddedBackend(attention_of(torch_engine.model), 1, torch.float32, torch.device("cpu"))
        assert backend.packer(None).window == onnx_engine.window == (WINDOW if windowed else None)


class TestVariants:
    """Variants of architectures for which the two engines share all code: torch alone suffices."""

    @pytest.mark.parametrize(
        ("name", "overrides"),
        [
            ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
            ("gemma3", {"attn_logit_softcapping": 4.0}),
            ("gpt2", {"tie_word_embeddings": True, "scale_attn_by_inverse_layer_idx": True}),
            ("llama", {"num_key_value_heads": 1, "attention_bias": True, "tie_word_embeddings": True}),
            ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}}),
        ],
        ids=["some-layers-windowed", "windowed-and-capped", "scaled-by-layer", "one-key-head", "linear-rope"],
    )
    def test_own_forward(self, name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
        directory = make(name, tmp_path, **overrides)
        subject = Subject(CpuEngine(ModelDirectory(directory), capacity=CAPACITY), Oracle(directory))
        session = prefilled(subject, words(6, 61))
        step = Step(subject)
        tree = Tree(session, step)
        tree.as_paths(step)
        step.run()

    def test_float16_stays_close(self, tmp_path: Path) -> None:
        """With padded batches, as on GPUs."""
        directory = make("gemma2", tmp_path)
        engine = TorchEngine(ModelDirectory(directory), capacity=CAPACITY, dtype="float16", exact=False)
        got, want = last_logits(engine, words(1, 40)), Oracle(directory).logits(words(1, 40))[-1]
        assert got.dtype == np.float32
        assert 1e-5 < np.abs(got - want).max() / np.abs(want).max() < 0.02

    def test_bfloat16_stays_close(self, tmp_path: Path) -> None:
        """Head and logits are float32 nevertheless."""
        directory = make("llama", tmp_path)
        engine = CpuEngine(ModelDirectory(directory), capacity=CAPACITY, dtype="bfloat16")
        got, want = last_logits(engine, words(1, 40)), Oracle(directory).logits(words(1, 40))[-1]
        assert got.dtype == np.float32
        assert len(np.unique(got)) == VOCABULARY  # rounded to bfloat16 some would be equal
        assert 1e-5 < np.abs(got - want).max() / np.abs(want).max() < 0.1


class TestTheModelsAreWorthTestingOn:
    """Guards against comparisons that could not fail."""

    def test_greedy_text_wanders(self, oracle: Oracle) -> None:
        text = words(1, 10)
        for _ in range(30):
            text.append(int(oracle.logits(text)[-1].argmax()))
        assert len(set(text[10:])) > 10

    @pytest.mark.parametrize(
        ("name", "overrides"),
        [
            ("mistral", {"sliding_window": None}),
            ("gemma2", {"sliding_window": 10_000}),
            ("gemma2", {"attn_logit_softcapping": None}),
            ("gemma2", {"final_logit_softcapping": None}),
            ("gemma3", {"sliding_window": 10_000}),
        ],
        ids=lambda value: value if isinstance(value, str) else "-".join(value),
    )
    def test_windows_and_caps_change_the_logits(self, name: str, overrides: dict[str, Any], tmp_path: Path) -> None:
        text = words(1, 2 * WINDOW)
        usual = Oracle(make(name, tmp_path / "usual")).logits(text)[-1]
        other = Oracle(make(name, tmp_path / "other", **overrides)).logits(text)[-1]
        assert np.abs(usual - other).max() / np.abs(usual).max() > 100 * TOLERANCE


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
        with pytest.raises(ModelDirectoryError, match="has neither max_position_embeddings nor n_positions"):
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
        """An additional term in the softmax, unsupported by packed attention."""
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
        """Separate classes for each attention implementation: ours is none of them."""
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
        """In short ones the packed attention agrees with the model's own: real models differ only after thousands of
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
        """It is run, and the check at start compares it with the model's own forward pass."""
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
