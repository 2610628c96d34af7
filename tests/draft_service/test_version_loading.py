"""Versions are loaded beside the serving one, or refused with the reason."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch

from draft_service.draft_loop import DraftLoop
from draft_service.version_folder import FoundVersion
from draft_service.version_loading import (
    BESIDE,
    NODES,
    CheckedPass,
    VersionLoader,
    VersionRefusedError,
    check_logits,
    remove_export,
)
from specdec.decoding.draft_logits import HostDraftLogits
from specdec.engine.batch import PackedBatch
from specdec.engine.cpu.layout import RaggedPacker
from specdec.engine.derived_models import user_cache
from specdec.engine.learned_from import LEARNED_FROM, LearnedFrom, tenant_digest
from specdec.engine.model_directory import GRAPH, WEIGHTS, ModelDirectory
from specdec.engine.placement import Placement
from tests.draft_service.fakes import Engine, Listener, session
from tests.draft_service.versioned import Guessing, not_a_number
from tests.models import CONTEXT, VOCABULARY, make, near

PLACEMENT = Placement("eager", kv_tokens=2048, is_draft=True)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return make("llama", tmp_path_factory.mktemp("models") / "first")


@pytest.fixture
def version(source: Path, tmp_path: Path) -> FoundVersion:
    """A version that differs a little from the first model."""
    return FoundVersion("v2", near(source, tmp_path / "v2", noise=0.02), ())


def loader(source: Path, placement: Placement = PLACEMENT, **options: float) -> VersionLoader:
    return VersionLoader(ModelDirectory(source), CONTEXT, placement, 1, 4, options.get("max_slowdown", 1.5))


def test_a_good_version_drafts(source: Path, version: FoundVersion) -> None:
    found = loader(source).load(version, lambda nodes: 60.0)
    assert found.fingerprint == ModelDirectory(version.path).model_fingerprint
    assert found.export is None
    loop = DraftLoop(found.drafter)
    drafted = session()
    listener = Listener(loop, drafted)
    for _ in range(6):
        loop.turn()
    assert drafted.tree.size
    assert not listener.failed
    assert found.watched is not None
    assert found.watched.checks
    assert found.watched.rows > 0


def weights(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    """Return a function that changes the weights of a model."""

    def apply(path: Path) -> None:
        tensors = safetensors.torch.load_file(path / WEIGHTS)
        change(tensors)
        safetensors.torch.save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})

    return apply


def poison_a_rare_token(tensors: dict[str, torch.Tensor]) -> None:
    """No check of a few tokens would find it."""
    tensors["model.embed_tokens.weight"][VOCABULARY - 1] = math.nan


def fields(name: str, **values: object) -> Callable[[Path], None]:
    """Return a function that sets fields of a JSON file."""

    def apply(path: Path) -> None:
        content = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps(content | values))

    return apply


def truncate(path: Path) -> None:
    file = path / WEIGHTS
    file.write_bytes(file.read_bytes()[:-100])


def rename_a_token(path: Path) -> None:
    content = json.loads((path / "tokenizer.json").read_text())
    content["added_tokens"][0]["content"] = "<other>"
    (path / "tokenizer.json").write_text(json.dumps(content))


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "truncated": (truncate, r"model.safetensors: has \d+ bytes, must have \d+ by its header"),
    "half written": (lambda path: (path / "config.json").write_text('{"model_type": "lla'), "config.json: not JSON"),
    "no weights": (lambda path: (path / WEIGHTS).unlink(), "no weights"),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), "no tokenizer.json"),
    "NaN": (weights(poison_a_rare_token), "model.embed_tokens.weight has numbers that are not finite"),
    "another tokenizer": (rename_a_token, "the tokenizers of .* differ"),
    "a short context": (
        fields("config.json", max_position_embeddings=128),
        "has a context of 128 tokens, must have 256",
    ),
    "an unknown architecture": (fields("config.json", model_type="unheard_of"), "unheard_of"),
    "gone": (shutil.rmtree, "no such directory"),
}


@pytest.mark.parametrize(("breaks", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_version_is_refused_with_the_reason(
    source: Path, version: FoundVersion, breaks: Callable[[Path], object], reason: str
) -> None:
    breaks(version.path)
    with pytest.raises(VersionRefusedError, match=reason) as refused:
        loader(source).load(version, None)
    assert "\n" not in str(refused.value)


def test_other_token_ids_are_refused(source: Path, tmp_path: Path) -> None:
    wide = FoundVersion("v2", make("llama", tmp_path / "v2", vocab_size=VOCABULARY + 8), ())
    with pytest.raises(
        VersionRefusedError, match=f"^has a vocabulary of {VOCABULARY + 8} tokens, must have {VOCABULARY}$"
    ):
        loader(source).load(wide, None)


def test_one_for_which_there_is_no_memory_is_refused(source: Path, version: FoundVersion) -> None:
    """Before any of it is loaded."""
    with pytest.raises(VersionRefusedError, match=r"^v2 needs .* but cpu has .* GB free: use fewer --kv-tokens$"):
        loader(source, replace(PLACEMENT, kv_tokens=10**11)).load(version, None)


def test_a_slow_one_is_refused(source: Path, version: FoundVersion) -> None:
    reason = rf"^a pass over {NODES} nodes takes .* ms, must take at most {BESIDE * 1.5:g} times the 1e-05 ms of"
    with pytest.raises(VersionRefusedError, match=reason):
        loader(source).load(version, lambda nodes: 1e-8)


def test_logits_that_are_not_finite_are_refused() -> None:
    check_logits(Engine())
    with pytest.raises(VersionRefusedError, match="its logits of a text of 32 tokens are not finite"):
        check_logits(Guessing(lasts=0, ends=not_a_number))


def two_rows() -> PackedBatch:
    packer = RaggedPacker()
    packer.add_path(np.array([1, 2]), packer.add_rows([3, 4], 0, [1, 2]))
    return packer.pack()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_pass_on_trial_does_not_hide_numbers_that_are_not_finite(bad: float) -> None:
    """It checks only rows that are read. Once it stops checking, such rows give no candidates, as elsewhere."""
    rows = np.zeros((3, 300), dtype=np.float32)
    rows[1, 5] = bad
    if bad < 0:
        rows[1] = bad  # a single -inf is a token that is never chosen
    watched = CheckedPass(lambda batch: HostDraftLogits(rows))
    batch = two_rows()
    logits = watched(batch)
    assert watched.rows == 2
    logits.shortlists([0, 2])
    logits.whole([0, 2])
    with pytest.raises(FloatingPointError, match="the logits of 1 of 3 rows are not finite"):
        logits.shortlists([0, 1, 2])
    with pytest.raises(FloatingPointError, match="the logits of 1 of 1 rows are not finite"):
        logits.whole([1])
    watched.checks = False
    watched(batch).shortlists([0, 1, 2])


def test_a_single_token_that_is_never_chosen_is_sound() -> None:
    rows = np.zeros((1, 300), dtype=np.float32)
    rows[0, 5] = -np.inf
    CheckedPass(lambda batch: HostDraftLogits(rows))(two_rows()).shortlists([0])


@pytest.mark.verify
def test_a_version_is_exported_and_its_export_goes_with_it(
    source: Path, version: FoundVersion, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    of_onnx = Placement("onnx", kv_tokens=2048, is_draft=True)
    learned_from = LearnedFrom().with_texts({tenant_digest("acme"): 1.0})
    (version.path / LEARNED_FROM).write_text(json.dumps(learned_from.content))
    found = loader(source, of_onnx).load(version, None)
    assert found.learned_from == learned_from
    assert found.export is not None
    assert LearnedFrom.of(found.export) == learned_from
    assert user_cache() in found.export.parents
    assert (found.export / GRAPH).is_file()
    remove_export(found.export)
    assert not list(user_cache().rglob(GRAPH))
    with pytest.raises(VersionRefusedError, match="must take at most"):
        loader(source, of_onnx).load(version, lambda nodes: 1e-8)
    assert not list(user_cache().rglob(GRAPH))
    first = FoundVersion("first", source, ())  # as when it serves again: the next start needs its export
    assert loader(source, of_onnx).load(first, None).export is None
    assert list(user_cache().rglob(GRAPH))
