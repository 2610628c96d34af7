"""A derived model replaces only what it may, and is readable by those whom the umask permits."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specdec.engine.model_directory import DESCRIPTION
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.model_folder import check_replaceable, replaced


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o755), (0o077, 0o700)])
def test_a_folder_has_the_permissions_that_the_umask_leaves(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with replaced(tmp_path / "out", DESCRIPTION) as folder:
            (folder / DESCRIPTION).write_text("{}")
            (folder / "model.safetensors").touch(mode=0o600)  # as safetensors writes it
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == mode
    assert (tmp_path / "out" / "model.safetensors").stat().st_mode & 0o777 == mode & 0o666


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(ModelDirectoryError, match=r"out: cannot be created: Not a directory: .*file$"),
        replaced(tmp_path / "file" / "out", DESCRIPTION),
    ):
        pass


def test_a_mount_point_is_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "out").mkdir()
    check_replaceable(tmp_path / "out", DESCRIPTION)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path / "out")
    with pytest.raises(ModelDirectoryError, match="out: is a mount point, which cannot be replaced"):
        check_replaceable(tmp_path / "out", DESCRIPTION)


def test_what_a_link_names_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(2):
        (tmp_path / "link").unlink(missing_ok=True)
        (tmp_path / "link").symlink_to("real")
        with replaced(tmp_path / "link", DESCRIPTION) as folder:
            (folder / DESCRIPTION).write_text(str(number))
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / DESCRIPTION).read_text() == str(number)
    monkeypatch.chdir(tmp_path / "real")
    with replaced(Path(), DESCRIPTION) as folder:
        (folder / DESCRIPTION).write_text("2")
    assert (tmp_path / "real" / DESCRIPTION).read_text() == "2"


def test_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="full"), replaced(tmp_path / "out", DESCRIPTION):
        raise OSError("full")
    assert list(tmp_path.iterdir()) == []
