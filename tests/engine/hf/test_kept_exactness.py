"""With cached exactness results, start-up checks only one prompt; inconsistent entries are ignored."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.engine.batch import PackedBatch
from specdec.engine.engines.cpu_engine import CpuEngine
from specdec.engine.hf.fingerprint import machine
from specdec.engine.hf.hidden_states import Features
from specdec.engine.model_directory import ModelDirectory
from tests.models import make

pytestmark = pytest.mark.skipif(
    machine() is None, reason="nothing is kept on a machine that cannot be told from others"
)

FEW, MANY = 2, 20
"""Maximum passes of a start with cached results (reference check and one prompt), and minimum of one without."""


class Counting(CpuEngine):
    passes = 0

    def logits(self, batch: PackedBatch, features: Features | None = None) -> Tensor:
        self.passes += 1
        return super().logits(batch, features)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("opt", tmp_path_factory.mktemp("models"))


def start(model: Path, threads: int = 1) -> Counting:
    engine = Counting(ModelDirectory(model), capacity=2048, threads=(threads,))
    if not engine.exact:
        pytest.skip("rows depend on their batch on this machine")
    return engine


def kept(folder: Path) -> Path:
    (entry,) = folder.glob("exactness-*")
    return entry


@dataclass(frozen=True)
class First:
    """What is left of a first start."""

    numerics: str
    file: str
    found: Any  # content of the file


@pytest.fixture(scope="module")
def first(model: Path, tmp_path_factory: pytest.TempPathFactory) -> First:
    folder = tmp_path_factory.mktemp("first") / "cache"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE_DIR", str(folder))
        engine = start(model)
    entry = kept(folder)
    return First(engine.numerics, entry.name, json.loads(entry.read_bytes()[hashlib.sha256().digest_size :]))


def test_the_next_start_believes_what_it_finds(folder: Path, model: Path) -> None:
    first, second = start(model), start(model)
    assert first.passes > MANY
    assert second.passes <= FEW
    assert second.exact
    assert second.numerics == first.numerics


def test_other_weights_are_checked(folder: Path, model: Path, tmp_path: Path) -> None:
    start(model)
    other = make("opt", tmp_path)
    weights = other / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1  # the last number, same length
    weights.write_bytes(content)
    assert start(other).passes > MANY


def test_other_threads_are_checked(folder: Path, model: Path) -> None:
    start(model)
    assert start(model, threads=2).passes > MANY
    torch.set_num_threads(1)


def without(product: int) -> Callable[[Any], Any]:
    return lambda found: found | {"products": found["products"][:product] + found["products"][product + 1 :]}


WRONG: dict[str, Callable[[Any], Any]] = {
    "other bits": lambda found: found | {"bits": "0" * 64},
    "no bits": lambda found: {"products": found["products"]},
    "bits of another type": lambda found: found | {"bits": 1},
    "a missing product": without(0),
    "row counts that were never compared": lambda found: (
        found | {"products": [[*row[:2], 1, 17] for row in found["products"]]}
    ),
    "no row counts": lambda found: found | {"products": [row[:2] for row in found["products"]]},
    "row counts of another type": lambda found: found | {"products": [[*row[:2], "1"] for row in found["products"]]},
    "nested": lambda found: found | {"products": [[*row[:2], [1]] for row in found["products"]]},
    "a list": lambda found: [found],
    "nothing": lambda found: None,
}


OF_ANOTHER_TYPE = {"no bits", "bits of another type", "no row counts", "row counts of another type", "a list"}
"""Entries whose fields are missing or of another type, as in others."""


@pytest.mark.parametrize(
    "wrong", [pytest.param(each, marks=[pytest.mark.verify] if each in OF_ANOTHER_TYPE else []) for each in WRONG]
)
def test_an_entry_that_cannot_be_right_is_not_believed(folder: Path, model: Path, first: First, wrong: str) -> None:
    data = json.dumps(WRONG[wrong](first.found)).encode()
    folder.mkdir(mode=0o700)
    (folder / first.file).write_bytes(hashlib.sha256(data).digest() + data)
    again = start(model)
    assert kept(folder).name == first.file
    assert again.passes > MANY
    assert again.numerics == first.numerics
    assert start(model).passes <= FEW  # the entry was repaired
