"""Preparation of a training of heads: the target's own text is saved and resumed like the training."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from specdec.engine.model_directory import ModelDirectory
from specdec.training.files import TEXTS, write_texts
from specdec.training.heads_command import HeadsOptions, PreparedHeads, prepared
from specdec.training.medusa import MedusaPlan
from specdec.training.plan import ResumeError
from specdec.training.texts import PROMPT_TOKENS, TextError
from tests.models import make

PLAN = MedusaPlan(heads=2, layers=1, steps=2, rows=2, length=48)
TEXTS_WANTED = 6  # in two parts
OWN_TOKENS = TEXTS_WANTED * (PLAN.length - PROMPT_TOKENS)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelDirectory:
    return ModelDirectory(make("llama", tmp_path_factory.mktemp("model") / "llama"))


def heads(target: ModelDirectory, out: Path, *, resume: bool = False) -> PreparedHeads:
    files = () if resume else (Path(argparse.__file__),)
    options = HeadsOptions(files, None if resume else OWN_TOKENS, "cpu")
    return prepared(target, options, PLAN, out, resume=resume)


def test_own_text_that_is_half_written_is_resumed(target: ModelDirectory, tmp_path: Path) -> None:
    whole = heads(target, tmp_path / "whole")
    while not whole.own_text.over:
        whole.own_text.step()
    cut = heads(target, tmp_path / "cut")
    cut.own_text.step()
    cut.own_text.save(tmp_path / "cut")
    rest = heads(target, tmp_path / "cut", resume=True)
    assert (rest.own_text.done, rest.own_text.total) == (TEXTS_WANTED // 2, TEXTS_WANTED)
    while not rest.own_text.over:
        rest.own_text.step()
    rest.own_text.save(tmp_path / "cut")
    windows = whole.training(tmp_path / "whole").windows
    training = rest.training(tmp_path / "cut")
    assert torch.equal(training.windows.trained, windows.trained)
    assert torch.equal(training.windows.held_out, windows.held_out)
    training.step()
    training.save(tmp_path / "cut")
    again = heads(target, tmp_path / "cut", resume=True)
    assert again.own_text.over
    assert again.training(tmp_path / "cut").done == 1


def test_another_target_in_a_directory_of_the_same_name_is_refused(target: ModelDirectory, tmp_path: Path) -> None:
    heads(target, tmp_path / "out")
    other = ModelDirectory(make("llama", tmp_path / "llama", seed=1))
    with pytest.raises(ResumeError, match="was started for another llama: its configuration or weights have changed"):
        heads(other, tmp_path / "out", resume=True)


def test_texts_of_an_earlier_version_are_refused(target: ModelDirectory, tmp_path: Path) -> None:
    heads(target, tmp_path)
    write_texts(tmp_path, torch.arange(96))
    with pytest.raises(ResumeError, match=rf"{TEXTS}: was written by an earlier version, cannot be resumed"):
        heads(target, tmp_path, resume=True)


def test_a_short_text_is_refused_before_anything_is_written(target: ModelDirectory, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("short")
    with pytest.raises(TextError, match=r"--text: has \d+ tokens, must have at least 96: two windows"):
        prepared(target, HeadsOptions([tmp_path / "text"], None, "cpu"), PLAN, tmp_path / "out", resume=False)
    assert not (tmp_path / "out").exists()
