"""The facts about a machine for a run on a GPU, as JSON: `python -m bench.gpu.probe`.

It runs in its own process, so that a library that breaks on import breaks nothing else. It never fails: what is absent
is null, false or an empty list.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

MODULES = {
    "torch": "torch",
    "triton": "triton",
    "transformers": "transformers",
    "safetensors": "safetensors",
    "tokenizers": "tokenizers",
    "numpy": "numpy",
    "numba": "numba",
    "jinja2": "jinja2",
    "jiter": "jiter",
    "grpc": "grpcio",
    "grpc_health": "grpcio-health-checking",
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "cryptography": "cryptography",
    "structlog": "structlog",
    "yaml": "pyyaml",
    "prometheus_client": "prometheus-client",
    "packaging": "packaging",
    "typer": "typer",
    "rich": "rich",
    "onnx": "onnx",
    "onnxscript": "onnxscript",
    "onnxruntime": "onnxruntime",
    "pytest": "pytest",
    "pytest_asyncio": "pytest-asyncio",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "matplotlib": "matplotlib",
}
"""Modules imported by a run, and the distribution of each."""

Facts = dict[str, Any]


def facts() -> Facts:
    return {
        "modules": {module: _version(module, name) for module, name in MODULES.items()},
        "gpu": _gpu(),
        "driver": _driver(),
        "providers": _providers(),
        "c_compiler": os.environ.get("CC") or next(filter(None, map(shutil.which, ("gcc", "clang", "cc"))), None),
        "python_headers": (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file(),
    }


def _version(module: str, name: str) -> str | None:
    """Return the version of an installed module, "unknown" if it has none; None if there is no such module."""
    if importlib.util.find_spec(module) is None:
        return None
    for each in (name, f"{name}-gpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(each)
    return "unknown"


def _gpu() -> dict[str, Any] | None:
    """Return the first GPU visible to torch."""
    with contextlib.suppress(Exception):  # a broken installation may raise anything
        import torch

        if torch.cuda.is_available():
            about = torch.cuda.get_device_properties(0)
            return {
                "name": about.name,
                "gib": round(about.total_memory / 2**30, 1),
                "free_gib": round(torch.cuda.mem_get_info(0)[0] / 2**30, 1),
                "capability": f"{about.major}.{about.minor}",
                "cuda": torch.version.cuda,
                "count": torch.cuda.device_count(),
            }
    return None


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip().splitlines()[0]
    return None


def _providers() -> list[str]:
    with contextlib.suppress(Exception):  # a broken installation may raise anything
        from specdec.engine.onnx_runtime import ort

        return list(ort.get_available_providers())
    return []


if __name__ == "__main__":
    print(json.dumps(facts()))
