"""Files of an unfinished training. Each is replaced as a whole, so a process killed at any moment leaves either the old
file or the new one. Imports no torch, so that a command reports immediately whether a training may begin."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from specdec.engine.model_directory import COMPLETE
from specdec.engine.model_file import ModelDirectoryError, in_one_line

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STATE, PLAN, TEXTS = "training.safetensors", "training.json", "texts.safetensors"
"""Names of three files: weights and moments in float32, with the number of steps done; the plan and its origin; the
tokens."""

PARTIAL = ".partial"
"""Suffix of a file that is being written."""

LEFT = ".tmp??????"
"""Pattern of the files that safetensors writes first, and leaves if the process is killed."""


class WriteError(Exception):
    """Raised, with a one-line message, if a file cannot be written, as on a full disk. The previous file is kept."""


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield the path for a file's new content, which then replaces the file. WriteError if that fails."""
    partial = file.with_name(f"{file.name}{PARTIAL}")
    try:
        yield partial
        os.replace(partial, file)
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)  # makes room on a full disk
        why = error.strerror if isinstance(error, OSError) and error.strerror else in_one_line(error)
        raise WriteError(f"{file}: cannot be written: {why}") from error


def as_stored(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a trained tensor as it is written to a file; floating-point numbers in `dtype`, if given."""
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    return tensor.detach().to("cpu", wanted).contiguous()


def replace_tensors(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors, readable only by their owner."""
    from safetensors.torch import save_file  # imports torch

    with replacing(file) as partial:
        save_file(dict(tensors), partial, metadata={"format": "pt"})


def read_tensors(file: Path) -> dict[str, Tensor]:
    """Return the tensors of a file; ModelDirectoryError if it cannot be read."""
    from safetensors.torch import load_file  # imports torch

    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelDirectoryError(f"{file}: cannot be read: {in_one_line(error)}") from error


def replace_json(file: Path, content: Mapping[str, object]) -> None:
    with replacing(file) as partial:
        partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def complete(out: Path) -> None:
    """Mark a trained draft as a complete version, for a folder of versions. WriteError if that fails."""
    with replacing(out / COMPLETE) as partial:
        partial.touch()


def make_folder(out: Path) -> None:
    """Create the folder of a training; WriteError if that fails."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise WriteError(f"{out}: cannot be created: {error.strerror or error}") from error


def lock(folder: Path) -> bool:
    """Lock a folder until this process ends; return False if another process has locked it. A file system without locks
    counts as unlocked."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # stays open: closing it would release the lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return False
    except OSError:
        os.close(descriptor)
    return True


def remove_leftovers(out: Path) -> None:
    """Remove what killed trainings left in a locked folder: each file is as large as the training's state."""
    for file in out.glob(LEFT):
        file.unlink(missing_ok=True)


def write_texts(out: Path, tokens: Tensor, **further: Tensor) -> None:
    """Write the tokens of a training, int64, to TEXTS: `tokens`, and `further` tensors under their own names."""
    make_folder(out)
    replace_tensors(out / TEXTS, {"tokens": tokens, **further})


def is_unused(out: Path) -> bool:
    """Return whether a training may begin in a folder: it is missing or empty, or contains only files of a training
    that was killed before it had a plan."""
    if not out.exists():
        return True
    left = {TEXTS, STATE, *(f"{name}{PARTIAL}" for name in (PLAN, TEXTS, STATE))}
    return out.is_dir() and all(file.name in left or file.match(LEFT) for file in out.iterdir())


def clear(out: Path) -> None:
    """Remove the files of an earlier training from an unused folder."""
    for name in (STATE, TEXTS):
        (out / name).unlink(missing_ok=True)
