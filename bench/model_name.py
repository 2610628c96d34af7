"""The name of a model in reports, with its size."""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path

ROLES = ("target", "draft")
"""Folder names that give a model's role, not its identity: the parent folder is named too."""


def model_name(directory: Path) -> str:
    """Return a name like "demo/target, 12M parameters"; without the size if there are no weights to count."""
    path = directory.resolve()
    name = f"{path.parent.name}/{path.name}" if path.name in ROLES else path.name
    count = sum(map(_parameters, path.glob("*.safetensors")))
    return f"{name}, {_size(count)} parameters" if count else name


def _size(count: int) -> str:
    return (
        f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.0f}M" if count >= 10**7 else f"{count / 1e6:.1f}M"
    )


def _parameters(file: Path) -> int:
    """Return the number of weights in a file, from its header."""
    with file.open("rb") as weights:
        (length,) = struct.unpack("<Q", weights.read(8))
        header = json.loads(weights.read(length))
    return sum(math.prod(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__")
