"""GGUF files (llama.cpp's format), used in place of model directories.

A file is converted once to a directory in Hugging Face's layout (`hf/gguf_conversion.py`), stored in the user's cache
(`derived_models.py`). Detecting a GGUF file and finding its conversion need no torch.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from specdec.engine.derived_models import make_user_cache, place_of_conversion, user_cache
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, add_sample, opened
from specdec.exit_status import how_it_ended
from specdec.roles import PYTHON, environment

MARKER = "gguf.json"
"""File in a converted model that describes its GGUF file and its kinds of weights."""

MAGIC = b"GGUF"
VERSIONS = (2, 3)
"""Readable versions of the format. Version 1 had narrower size fields; a big-endian file's version reads as another
number."""


def open_model(path: Path) -> ModelDirectory:
    """Open a model given as a directory or as a GGUF file, which is converted unless the cache has its conversion."""
    return ModelDirectory(_converted(path) if is_gguf(path) else path)


def is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf" and path.is_file()


def check_gguf(file: Path) -> None:
    """Raise ModelDirectoryError unless a file begins with GGUF's magic and a readable version."""
    with opened(file) as stream:
        begin = stream.read(8)
    version = int.from_bytes(begin[4:], "little")
    if begin[:4] != MAGIC:
        raise ModelDirectoryError(
            f"{file}: is not a GGUF file: it begins with {begin[:4]!r}, must begin with {MAGIC!r}"
        )
    if version not in VERSIONS:
        raise ModelDirectoryError(f"{file}: is GGUF version {version}, must be version 2 or 3")


def _converted(file: Path) -> Path:
    """Return the directory of a file's conversion, creating it if it is missing: in the user's cache, or in a temporary
    folder if the cache cannot be written. The conversion runs in a separate process, so that its memory is freed;
    progress and errors appear on stderr."""
    check_gguf(file)
    digest = hashlib.sha256(str(file.stat().st_mtime_ns).encode())  # mtime, since tools edit fields in place
    add_sample(digest, file)
    target = place_of_conversion(file, digest.hexdigest())
    if not (target / MARKER).is_file() and (why := _unwritable(target.parent)):
        target = _without_cache(why) / digest.hexdigest()[:24] / file.stem
    if not (target / MARKER).is_file():
        shutil.rmtree(target, ignore_errors=True)  # what a cleaner of the cache left
        command = [*PYTHON, "-m", "specdec.cli", "import-gguf", "--stop-with-stdin", str(file), str(target)]
        # If this process dies, the child's stdin closes, and the child removes its partial output.
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment()) as process:
            status = process.wait()
        if status:
            seen = ", see the line above" if status > 0 else ""
            raise ModelDirectoryError(f"{file}: was not converted: {how_it_ended(status)}{seen}")
    return target


def _unwritable(folder: Path) -> str:
    """Create a folder in the cache; return why it cannot be written to, empty if it can."""
    try:
        make_user_cache()
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return error.strerror or str(error)
    return "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"


def _without_cache(why: str) -> Path:
    """Return a folder for conversions in place of an unwritable cache; it is deleted when this process ends."""
    import structlog  # services have it; `specdec doctor` works without

    from specdec.engine.cache_folder import temporary

    cost = "every start converts GGUF files again"
    structlog.get_logger().warning("cache_not_used", folder=str(user_cache()), why=why, cost=cost)
    return temporary()
