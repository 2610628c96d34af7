"""The conditions of a measurement for its report (machine, versions, models), and the environment of processes whose
start is timed."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import struct
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("specdec-serve", "torch", "transformers", "onnxruntime", "onnxruntime-gpu", "grpcio")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
ROLES = ("target", "draft")
"""Folder names that give a model's role, not its identity: the parent folder is named too."""
_ROOT = Path(__file__).parent.parent


def machine() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    return {
        "processor": facts.get("model name", platform.machine()),
        "cores": os.cpu_count(),
        "instructions": [name for name in INSTRUCTIONS if name in facts.get("flags", "").split()],
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
    }


def versions() -> dict[str, str]:
    """Return the versions of Python, specdec (with its commit) and its main dependencies; other systems report their
    own."""
    found = {name: version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "commit": _commit()} | found


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, cwd=_ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    except OSError:  # git is not installed
        return "unknown"


def version(package: str) -> str:
    """Return the version of an installed package, or "absent"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


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


def as_installed(**variables: str) -> dict[str, str]:
    """Return this process's environment with additional variables, and without PYTHONDONTWRITEBYTECODE, since an
    installed package has its bytecode already."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | variables
