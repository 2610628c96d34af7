"""Altered copies of models, which make bad drafts."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.numpy import load_file

from bench.systems.altered import copied, other_tokenizer, random_weights
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from tests.models import make


def test_a_copy_has_the_changes(tmp_path: Path) -> None:
    draft = make("llama", tmp_path / "draft")
    other = ModelDirectory(copied(draft, tmp_path / "other", max_position_embeddings=77))
    assert other.context == 77
    assert other.tokenizer_fingerprint == ModelDirectory(draft).tokenizer_fingerprint


def test_random_weights_fit_the_target_and_are_others(tmp_path: Path) -> None:
    draft = make("llama", tmp_path / "draft", seed=3)
    other = random_weights(draft, tmp_path / "random")
    ModelDirectory(other).check_pair(ModelDirectory(draft))
    weights, others = (load_file(folder / "model.safetensors") for folder in (draft, other))
    assert weights.keys() == others.keys()
    assert (weights["lm_head.weight"] != others["lm_head.weight"]).any()


def test_another_tokenizer_cannot_be_paired(tmp_path: Path) -> None:
    draft = make("llama", tmp_path / "draft")
    with pytest.raises(ModelDirectoryError, match="tokenizer"):
        ModelDirectory(other_tokenizer(draft, tmp_path / "other")).check_pair(ModelDirectory(draft))
