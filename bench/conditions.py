"""Conditions of a measurement, for its report: the machine and the versions."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("specdec-serve", "torch", "transformers", "onnxruntime", "onnxruntime-gpu", "grpcio")
INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
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
    """Return the versions of specdec's dependencies; other systems report their own."""
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
