"""Check of an export's target, made before importing the exporter, which takes seconds."""

from __future__ import annotations

from pathlib import Path

from specdec.engine.model_directory import DESCRIPTION, ModelDirectoryError


def check_replaceable(target: Path) -> None:
    """Raise ModelDirectoryError unless a path is free for an export, or contains an older one."""
    if not target.exists() or (target / DESCRIPTION).is_file():
        return
    if not target.is_dir() or any(target.iterdir()):
        raise ModelDirectoryError(f"{target}: contains something other than an exported model, and is not replaced")
