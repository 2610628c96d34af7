"""The memory of models to be served together: its parts add up, and a table shows them."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from specdec.engine import derived_models
from specdec.engine.heads.kinds import memory_of_draft_heads, memory_of_heads
from specdec.engine.memory import MIN_SLOTS
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.preflight.memory_needed import memory_needed
from specdec.engine.preflight.memory_table import memory_lines, memory_of
from specdec.engine.unsupported import UnsupportedModelError
from specdec.local.models import DEMO
from tests.heads import HIDDEN, RandomBlock, make_block
from tests.models import VOCABULARY, make


def wanted(name: str, placement: Placement) -> tuple[Wanted, ModelDirectory]:
    return Wanted(DEMO / name, placement), ModelDirectory(DEMO / name)


def test_each_model_has_a_line_with_its_parts() -> None:
    needed = memory_of(
        {"target": wanted("target", Placement("torch", kv_tokens=4096)), "draft": wanted("draft", Placement("onnx"))}
    )
    head, target, draft = memory_lines(needed)
    assert head.split() == ["weights", "keys", "and", "values", "steps", "process", "export", "at", "most"]
    assert target.startswith("target  ")
    assert "4096 tokens" in target
    assert draft.startswith("draft   ")
    weights, kv, steps, process, _, together = (float(number) for number in re.findall(r"([\d.e+-]+) GB", target))
    assert together == pytest.approx(weights + kv + steps + process, rel=0.01)


def test_heads_are_counted_beside_the_target() -> None:
    pair = {"target": wanted("target", Placement("torch", kv_tokens=4096)), "draft": wanted("draft", Placement("onnx"))}
    needed = memory_of(pair, heads=partial(memory_of_heads, DEMO / "heads"))
    assert list(needed) == ["target", "heads", "draft"]
    assert needed["heads"].dtype == needed["target"].dtype
    assert needed["heads"].weights == 4 * 384 * (384 + 1) * (4 if needed["target"].dtype == "float32" else 2)
    assert needed["heads"].total == needed["heads"].weights + needed["heads"].working
    heads = list(memory_lines(needed))[2]
    assert heads.startswith("heads   ")
    assert "  none  " in heads
    assert needed["target"] == memory_of(pair)["target"]


@pytest.mark.parametrize(("tied", "tables"), [(True, 1), (False, 2)])
def test_heads_in_a_draft_service_are_counted_with_the_ends_of_their_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tied: bool, tables: int
) -> None:
    """Tied embeddings and output head are one table."""
    target, sizes = make("llama", tmp_path / "target", tie_word_embeddings=tied), RandomBlock()
    directory, placement = ModelDirectory(target), Placement("torch", dtype="float32", kv_tokens=700)
    draft = Wanted(target, placement, heads=partial(memory_of_draft_heads, make_block(tmp_path / "block", sizes)))
    needed = memory_of({"target": (Wanted(target, placement), directory), "draft": (draft, directory)})["draft"]
    numbers = sum(tensor.numel() for tensor in sizes.tensors().values()) + tables * VOCABULARY * HIDDEN
    assert (needed.weights, needed.tokens, needed.kv) == (4 * numbers, 700, 700 * 4 * 96)
    assert needed.total == needed.process + needed.weights + needed.working + needed.kv
    by_default = draft._replace(placement=Placement("torch", dtype="float32"))
    assert memory_of({"draft": (by_default, directory)})["draft"].tokens > MIN_SLOTS
    monkeypatch.setattr("specdec.engine.preflight.check.free_bytes", lambda _: 700_000_000)
    with pytest.raises(UnsupportedModelError, match=r"heads block needs .* for 700 tokens of keys and values"):
        check(Wanted(target, placement), draft._replace(translates=True))


def test_the_second_model_has_what_the_first_leaves() -> None:
    """Both size their caches by half of the free memory: a target that takes almost all of it leaves little."""
    alone = memory_of({"draft": wanted("draft", Placement("onnx"))})["draft"]
    large = wanted("target", Placement("torch", kv_tokens=1 << 40))
    beside = memory_of({"target": large, "draft": wanted("draft", Placement("onnx"))})["draft"]
    assert beside.tokens < alone.tokens


def test_an_export_in_the_cache_needs_no_memory_for_exporting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = ModelDirectory(DEMO / "draft")
    before = memory_needed(directory, Placement("onnx"))
    assert before.export > 0
    export = derived_models.place_of_export(directory, "float32")
    export.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        (export / name).write_bytes((DEMO / "draft" / name).read_bytes())
    (export / "model.onnx").write_bytes(bytes(1000))
    (export / "specdec.json").write_text('{"dtype":')  # truncated
    assert memory_needed(directory, Placement("onnx")).export == before.export
    (export / "specdec.json").write_text('{"dtype": "float32", "pools": [[4, 64, 64]], "bytes": {"model.onnx": 1000}}')
    after = memory_needed(directory, Placement("onnx"))
    assert after.export == 0
    assert after.weights == 2000
    (export / "model.onnx").write_bytes(bytes(999))  # broken: it will be exported again
    assert memory_needed(directory, Placement("onnx")).export == before.export
