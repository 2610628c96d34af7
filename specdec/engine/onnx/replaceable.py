"""Where an export may be written: checked before the exporter, which takes seconds, is imported."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.model_directory import DESCRIPTION, ModelDirectoryError


def check_replaceable(target: Path) -> None:
    """Raise ModelDirectoryError unless a path is free for an export, or holds an older one."""
    if not target.exists() or (target / DESCRIPTION).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelDirectoryError(f"{target}: holds something else than an exported model; it is not replaced")
