"""A cache folder that cannot be written costs time, never a start."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.cache_folder import temporary
from specdec.engine.derived_models import place_of_export
from specdec.engine.model_directory import DESCRIPTION, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.model_folder import check_replaceable
from specdec.engine.onnx import first_use
from specdec.engine.onnx.first_use import exported
from specdec.local import DEMO
from tests.captured_logs import captured_logs

DRAFT = ModelDirectory(DEMO / "draft")


class Exports:
    """Stands in for the process that exports; folders below `full` cannot be written."""

    def __init__(self, *full: Path) -> None:
        self.full = full
        self.targets: list[Path] = []

    def __call__(self, directory: ModelDirectory, target: Path, *_: Any) -> None:
        self.targets.append(target)
        if any(target.is_relative_to(folder) for folder in self.full):
            raise OSError(errno.ENOSPC, "No space left on device", str(target))
        target.mkdir(parents=True)
        (target / DESCRIPTION).write_text("{}")


def test_a_full_cache_is_named_and_the_export_lives_as_long_as_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exports = Exports(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(first_use, "_export", exports)
    with captured_logs() as logs:
        found = exported(DRAFT)
    assert found == temporary() / DRAFT.name == exports.targets[-1]
    (told,) = [entry for entry in logs if entry["event"] == "cache_not_used"]
    assert (told["folder"], told["why"]) == (str(tmp_path / "specdec"), "No space left on device")


def test_an_export_that_lost_its_description_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after an interrupted removal of the cache."""

    def export(_: ModelDirectory, target: Path, *__: Any) -> None:
        check_replaceable(target, DESCRIPTION)
        target.mkdir()
        (target / DESCRIPTION).write_text("{}")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(first_use, "_export", export)
    target = place_of_export(DRAFT, "float32")
    target.mkdir(parents=True)
    (target / "model.onnx").write_text("left over")
    assert exported(DRAFT) == target
    assert not (target / "model.onnx").exists()


def test_a_cache_that_cannot_be_made_is_named_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    exports = Exports()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(first_use, "_export", exports)
    monkeypatch.setattr(first_use, "temporary", lambda: tmp_path / "own")
    with captured_logs() as logs:
        assert exported(DRAFT) == tmp_path / "own" / DRAFT.name
    assert [entry["folder"] for entry in logs if entry["event"] == "cache_not_used"] == [str(tmp_path / "file/specdec")]


def test_where_nothing_can_be_written_both_folders_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(first_use, "_export", Exports(tmp_path))
    monkeypatch.setattr(first_use, "temporary", lambda: tmp_path / "own")
    with pytest.raises(ModelDirectoryError) as told:
        exported(DRAFT)
    for part in (str(tmp_path / "cache"), str(tmp_path / "own"), "No space left on device", "XDG_CACHE_HOME"):
        assert part in str(told.value)
