"""Reports show models' common names."""

from __future__ import annotations

from pathlib import Path

from bench.model_name import model_name
from specdec.local import DEMO
from tests.models import make


def test_a_role_is_named_with_its_pair_and_size() -> None:
    assert model_name(DEMO / "target") == "demo/target, 12M parameters"
    assert model_name(DEMO / "draft") == "demo/draft, 2.6M parameters"


def test_a_model_of_ones_own_is_named_by_its_folder(tmp_path: Path) -> None:
    assert model_name(make("llama", tmp_path / "mine")) == "mine, 0.1M parameters"


def test_without_weights_there_is_no_size(tmp_path: Path) -> None:
    assert model_name(tmp_path) == tmp_path.name
