"""Ways to break a model directory, and the message of the refusal."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specdec.engine.model_file import ModelDirectoryError

MAX_LINE_CHARACTERS = 600
Break = Callable[[Path], None]
"""Breaks a directory."""

CONFIG, GENERATION = "config.json", "generation_config.json"
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"


def edit(name: str, **fields: Any) -> Break:
    """Replace fields of a JSON file."""

    def edited(directory: Path) -> None:
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return edited


def write(name: str, content: bytes) -> Break:
    """Replace a whole file."""

    def written(directory: Path) -> None:
        (directory / name).write_bytes(content)

    return written


def become(name: str, making: Callable[[Path], object]) -> Break:
    """Replace a file by something else."""

    def replaced(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        making(directory / name)

    return replaced


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "directory": (lambda file: file.mkdir(), "is not a regular file"),
    "fifo": (os.mkfifo, "is not a regular file"),
    "device": (lambda file: file.symlink_to("/dev/zero"), "is not a regular file"),
    "dangling": (lambda file: file.symlink_to("gone"), '(a link to "gone"): cannot be read: No such file'),
    "loop": (lambda file: file.symlink_to(file.name), "cannot be read: Too many levels of symbolic links"),
}


def refused(make: Callable[[], object]) -> str:
    """Return the one-line message of the refusal."""
    with pytest.raises(ModelDirectoryError) as error:
        make()
    line = str(error.value)
    assert len(line.splitlines()) == 1
    assert len(line) < MAX_LINE_CHARACTERS
    return line
