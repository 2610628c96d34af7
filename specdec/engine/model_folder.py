"""Writing a model folder that we derive from another model: an export, or the conversion of a GGUF file.

A folder of our own has a marker file, so that nothing else is ever replaced. Imports neither torch nor an exporter.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.engine.model_file import ModelDirectoryError

MARKERS = {"specdec.json": "an exported model", "gguf.json": "a converted GGUF file"}
"""Marker files to the contents of their folders."""

STALE_SECONDS = 3600.0
"""Age of an unfinished folder without new files after which nobody is writing it."""


def check_replaceable(target: Path, marker: str) -> None:
    """Raise ModelDirectoryError unless a path is free, an empty directory, or has this marker."""
    if not target.exists() or (target / marker).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelDirectoryError(f"{target}: contains something other than {MARKERS[marker]}, and is not replaced")


@contextmanager
def replaced(target: Path, marker: str) -> Iterator[Path]:
    """Yield an empty directory to write into; afterwards it takes the place of `target`. If an exception is raised,
    nothing of it remains. Services that use an earlier `target` keep the files they have open."""
    check_replaceable(target, marker)
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target)
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        _replace(target, partial, marker)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_stale(target: Path) -> None:
    """Remove what killed processes have left of earlier attempts."""
    for left in target.parent.glob(f"{target.name}.partial-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > STALE_SECONDS:
                shutil.rmtree(left, ignore_errors=True)


def _replace(target: Path, new: Path, marker: str) -> None:
    """Replace a directory, which is missing only for a moment."""
    before = new.with_name(f"{new.name}-before")
    if target.exists():
        target.rename(before)
    try:
        new.rename(target)
    except OSError:
        if (target / marker).is_file():  # another process has written the same meanwhile
            return
        if before.exists():
            before.rename(target)
        raise
    finally:
        if (target / marker).is_file():
            shutil.rmtree(before, ignore_errors=True)
