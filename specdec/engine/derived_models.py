"""Models derived from others, stored in the user's cache: exports to ONNX, and conversions of GGUF files.

They are in `$XDG_CACHE_HOME/specdec`, else `~/.cache/specdec`. `SPECDEC_CACHE_DIR` neither moves nor disables them,
since a service with a derived model cannot start without that model. Needs only the standard library, for `specdec
doctor`.
"""

from __future__ import annotations

import os
from pathlib import Path

from specdec.engine.model_directory import DESCRIPTION, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, read_fields

EXPORTS, CONVERSIONS = "onnx-3", "gguf-2"
"""Folders in the cache. The number in a name changes with the format of the contents."""


def user_cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(os.path.expanduser("~")) / ".cache") / "specdec"


def make_user_cache() -> None:
    """Create the cache's folder if it is missing, with the mode that `cache_folder.py` requires."""
    user_cache().mkdir(mode=0o700, parents=True, exist_ok=True)


def place_of_export(directory: ModelDirectory, dtype: str, *, quantised: bool = False) -> Path:
    """Return the path of a model's export, whether or not it exists. `quantised`: its weights have an automatically
    chosen number of bits."""
    kind = f"{dtype}-fewest-bits" if quantised else dtype
    return user_cache() / EXPORTS / kind / directory.model_fingerprint[:24] / directory.name


def place_of_conversion(file: Path, fingerprint: str) -> Path:
    """Return the path of a GGUF file's conversion, whether or not it exists."""
    return user_cache() / CONVERSIONS / fingerprint[:24] / file.stem


def what_is_broken(export: Path) -> str | None:
    """Describe the first file of an export that is missing or whose size is not the recorded one; None if all are
    intact."""
    try:
        description = read_fields(export / DESCRIPTION)
        if description is None:
            return f"no {DESCRIPTION}"
        sizes = description.fields("bytes").content
    except ModelDirectoryError as error:  # the export's description is unreadable
        return str(error)
    for name, size in sizes.items():
        found = (export / name).stat().st_size if (export / name).is_file() else 0
        if found != size:
            return f"{name} has {found} bytes, must have {size}"
    return None
