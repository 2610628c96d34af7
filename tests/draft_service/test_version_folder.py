"""The folder of versions: which versions count as complete, and when the folder has changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draft_service.version_folder import MAX_VERSIONS, FoundVersion, VersionsError, VersionsFolder
from specdec.engine.model_directory import COMPLETE, DESCRIPTION
from specdec.serving.watched import Watched


def version(folder: Path, name: str, at: int, marker: str | None = COMPLETE) -> Path:
    """Make a version with a marker of this time."""
    directory = folder / name
    directory.mkdir()
    if marker is not None:
        (directory / marker).write_text("")
        os.utime(directory / marker, (at, at))
    return directory


def names(found: tuple[FoundVersion, ...]) -> list[str]:
    return [each.name for each in found]


def test_complete_versions_come_in_the_order_of_their_markers(tmp_path: Path) -> None:
    version(tmp_path, "b", 300)
    version(tmp_path, "a", 300)
    version(tmp_path, "exported", 100, DESCRIPTION)
    version(tmp_path, "z.1-x_y", 200)
    folder = VersionsFolder(tmp_path)
    assert names(folder.read()) == ["exported", "z.1-x_y", "a", "b"]
    assert folder.left_out == ""


def test_what_is_being_written_is_not_looked_at(tmp_path: Path) -> None:
    for name in (".incoming", "v2.partial-x1y2", "v2.partial-x1y2-before"):
        version(tmp_path, name, 100)
    (tmp_path / "notes.txt").write_text("")
    folder = VersionsFolder(tmp_path)
    assert (folder.read(), folder.left_out) == ((), "")


def test_a_directory_becomes_a_version_with_its_marker(tmp_path: Path) -> None:
    version(tmp_path, "v1", 100)
    directory = version(tmp_path, "v2", 0, marker=None)
    watched = Watched(VersionsFolder(tmp_path))
    assert names(watched.contents) == ["v1"]
    assert watched.refused  # so that a forgotten marker is noticed
    (directory / "config.json").write_text("{}")
    watched.changed()
    assert names(watched.contents) == ["v1"]
    (directory / COMPLETE).write_text("")
    assert watched.changed()
    assert names(watched.contents) == ["v1", "v2"]
    assert not watched.refused


def test_a_directory_that_is_renamed_is_a_version_at_once(tmp_path: Path) -> None:
    directory = version(tmp_path, ".v1", 100)
    watched = Watched(VersionsFolder(tmp_path))
    assert not watched.changed()
    directory.rename(tmp_path / "v1")
    assert watched.changed()
    assert names(watched.contents) == ["v1"]


def test_a_marker_that_is_touched_is_another_one(tmp_path: Path) -> None:
    marker = version(tmp_path, "v1", 100) / COMPLETE
    watched = Watched(VersionsFolder(tmp_path))
    (before,) = watched.contents
    os.utime(marker, (200, 200))
    assert watched.changed()
    (after,) = watched.contents
    assert before.marked != after.marked


def test_names_that_are_none_are_left_out(tmp_path: Path) -> None:
    version(tmp_path, "a version", 100)
    version(tmp_path, "x" * 65, 100)
    version(tmp_path, "good", 100)
    folder = VersionsFolder(tmp_path)
    assert names(folder.read()) == ["good"]
    assert folder.left_out == "; ".join(
        f"{name!r} is not a name of 1 to 64 letters, digits, . _ and -" for name in ("a version", "x" * 65)
    )


def test_of_too_many_the_latest_are_taken(tmp_path: Path) -> None:
    for number in range(MAX_VERSIONS + 2):
        version(tmp_path, f"v{number}", 100 + number)
    folder = VersionsFolder(tmp_path)
    assert names(folder.read()) == [f"v{number}" for number in range(MAX_VERSIONS + 2)]
    assert folder.left_out == f"{MAX_VERSIONS + 2} versions, must be at most {MAX_VERSIONS}: the oldest are not tried"


def test_a_folder_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    missing = tmp_path / "none"
    with pytest.raises(VersionsError, match=f"^--versions {missing}: cannot be read: No such file or directory$"):
        Watched(VersionsFolder(missing))


def test_a_folder_that_vanishes_leaves_the_versions_as_they_were(tmp_path: Path) -> None:
    folder = tmp_path / "versions"
    folder.mkdir()
    version(folder, "v1", 100)
    watched = Watched(VersionsFolder(folder))
    folder.rename(tmp_path / "elsewhere")
    assert not watched.changed()
    assert names(watched.contents) == ["v1"]
    assert watched.refused
