"""The engines' logits match the model's own forward pass in every batch.

For every architecture of `tests.models`, in float32, on torch with ragged and with padded batches and on the exported
ONNX graph: sessions of different lengths prefilled in chunks and stepped in one batch, a block rolled back and
rewritten, a branching tree as paths and as one masked lane, rows of memory copied, texts far longer than the sliding
window.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec.engine.engine import Placed, cpu_threads, hidden_states
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.engines.loading import load_engine
from specdec.engine.hf.pretrained import attention_of
from specdec.engine.model_directory import DESCRIPTION, GRAPH, ModelDirectory
from specdec.engine.onnx import engine as onnx_engine_module
from specdec.engine.onnx.engine import OnnxEngine
from specdec.engine.onnx.export import export
from specdec.engine.onnx.first_use import exported
from specdec.engine.padded.backend import PaddedBackend
from specdec.engine.padded.layout import PaddedBatch
from specdec.engine.placement import Placement
from specdec.engine.unsupported import UnsupportedModelError
from tests.engine.own_forward import CAPACITY, TOLERANCE, Oracle, Session, Step, Subject, Tree, prefilled, words
from tests.models import ARCHITECTURES, END, VOCABULARY, WINDOW, make

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="session")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


LATER = {"qwen2", "gemma3", "opt"}
"""Architectures left to `make verify`: the others run all code of ours."""


@pytest.fixture(
    scope="session",
    params=[pytest.param(name, marks=[pytest.mark.verify] if name in LATER else []) for name in ARCHITECTURES],
)
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
    """An engine as on devices other than the CPU: attention by tensor operations with masks, not exact."""
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


def test_an_onnx_pass_beyond_its_memory_runs_in_parts(
    onnx_directory: Path, oracle: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each lane by itself: three texts' chunks, then one token of each beside a tree."""
    monkeypatch.setattr(onnx_engine_module, "ATTENTION_BYTES", 1)
    subject = Subject(OnnxEngine(ModelDirectory(onnx_directory), capacity=CAPACITY, threads=1), oracle)
    sessions = [Session(subject, words(i, length)) for i, length in enumerate((90, 3, 140))]
    step = Step(subject)
    for session in sessions:
        session.compute(step)
    batch = step.packer.pack()
    assert isinstance(batch, PaddedBatch)
    assert len(batch.groups) == 2 + 1 + 3  # a lane for each 64 tokens of a text
    step.run(batch)
    step = Step(subject)
    for session in sessions:
        session.text += words(10, 1)
        session.compute(step)
    Tree(sessions[1], step).as_leaves(step)
    step.run()


def test_an_exported_graph_gives_no_hidden_states(onnx_engine: OnnxEngine) -> None:
    with pytest.raises(UnsupportedModelError, match=r"^OnnxEngine returns no hidden states with logits"):
        hidden_states(onnx_engine)


@pytest.fixture(params=["torch", "padded", "onnx"])
def subject(request: pytest.FixtureRequest, oracle: Oracle) -> Subject:
    """Each engine in turn, with an empty pool, and memory that holds leftovers of earlier tests."""
    return Subject(request.getfixturevalue(f"{request.param}_engine"), oracle)


class TestReferenceForward:
    """Both engines agree with the model's own forward pass."""

    def test_sessions_of_different_lengths_in_chunks_and_steps(self, subject: Subject) -> None:
        """Up to 144 tokens: nine windows and three key buckets. One session ends midway, and a new one, prefilled in
        chunks, takes its slots and others."""
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
        """Three guesses of six tokens each, the first two right; a neighbour takes the slots of the other four."""
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

    @pytest.mark.parametrize("layout", [Tree.as_paths, Tree.as_leaves], ids=["paths", "leaves"])
    def test_a_tree_is_verified_copied_out_and_continued(
        self, subject: Subject, layout: Callable[[Tree, Step], None]
    ) -> None:
        """The tree crosses a key bucket, next to a plain step of a neighbour. Then one path is accepted: its rows are
        copied to slots of the session, the tree slots go to the neighbour, and both continue."""
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
