"""Writes a model folder derived from another model: an export, or the conversion of a GGUF file.

Derived folders have a marker file, so that no other folder is ever replaced. Imports neither torch nor an exporter.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.engine.gguf_file import MARKER
from specdec.engine.model_directory import DESCRIPTION
from specdec.engine.model_file import ModelDirectoryError

MARKERS = {DESCRIPTION: "an exported model", MARKER: "a converted GGUF file"}
"""Marker file -> what its folder contains."""

STALE_SECONDS = 3600.0
"""An unfinished folder without new files for this long is considered abandoned."""


def check_replaceable(target: Path, marker: str, source: Path | None = None) -> None:
    """Raise ModelDirectoryError if a path exists, unless it is an empty directory or has this marker. A mount point
    cannot be replaced, whatever it contains, and neither can a folder with the `source` of the new one."""
    if os.path.ismount(target):
        raise ModelDirectoryError(f"{target}: is a mount point, which cannot be replaced: name a folder in it")
    if not target.exists() or (target / marker).is_file():
        if source is not None and source.resolve().is_relative_to(target.resolve()):
            raise ModelDirectoryError(f"{target}: is not replaced, because it contains the source, {source}")
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelDirectoryError(
            f"{target}: is not replaced, because it contains something other than {MARKERS[marker]}"
        )


@contextmanager
def replaced(target: Path, marker: str, source: Path | None = None) -> Iterator[Path]:
    """Yield an empty directory to write into, which replaces `target` afterwards, with the permissions that the umask
    leaves. ModelDirectoryError as in `check_replaceable`, or if the directory cannot be created. If `target` is a link,
    what it names is replaced. If an exception is raised, the directory is removed. Services that use an earlier
    `target` keep the files that they have open."""
    target = target.resolve()
    check_replaceable(target, marker, source)
    partial = target.with_name(f"{target.name}.partial-{secrets.token_hex(4)}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        partial.mkdir()
    except OSError as error:
        why = "Not a directory" if isinstance(error, FileExistsError) else error.strerror or error
        raise ModelDirectoryError(f"{target}: cannot be created: {why}: {error.filename}") from error
    try:
        yield partial
        for path in partial.rglob("*"):  # some writers let only their own user read
            if path.is_file():
                path.chmod(partial.stat().st_mode & 0o666)
        _replace(target, partial, marker)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove the leftovers of earlier attempts by killed processes."""
    for left in target.parent.glob(f"{target.name}.partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _replace(target: Path, new: Path, marker: str) -> None:
    """Replace a directory; it is missing only for a moment."""
    before = new.with_name(f"{new.name}-before")
    if target.exists():
        target.rename(before)
    try:
        new.rename(target)
    except OSError:
        if (target / marker).is_file():  # another process has written the same model meanwhile
            return
        if before.exists():
            before.rename(target)
        raise
    finally:
        if (target / marker).is_file():
            shutil.rmtree(before, ignore_errors=True)
