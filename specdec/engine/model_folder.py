"""Writing a model folder that we derive from another model: an export, or the conversion of a GGUF file.

A folder of our own has a marker file, so that nothing else is ever replaced. Imports neither torch nor an exporter.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specdec.engine.model_file import ModelDirectoryError

MARKERS = {"specdec.json": "an exported model", "gguf.json": "a converted GGUF file"}
"""Marker files to the contents of their folders."""


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
    partial = Path(tempfile.mkdtemp(prefix=f"{target.name}.partial-", dir=target.parent))
    try:
        yield partial
        _replace(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _replace(target: Path, new: Path) -> None:
    """Replace a directory, which is missing only for a moment."""
    before = new.with_name(f"{new.name}-before")
    if target.exists():
        target.rename(before)
    try:
        new.rename(target)
    except OSError:
        if before.exists():
            before.rename(target)
        raise
    shutil.rmtree(before, ignore_errors=True)
