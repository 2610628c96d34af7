"""Requirements of the steps of a GPU run, and a line with a remedy for each unmet one."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from bench.gpu.probe import MODULES, Facts

MIN_VERSIONS = {"torch": (2, 9), "triton": (3, 4), "transformers": (5, 20)}
"""Oldest versions accepted for a GPU run. It installs nothing, so torch and Triton may be older than in
pyproject.toml."""

SERVICE = (
    "numpy",
    "grpc",
    "grpc_health",
    "grpc_reflection",
    "grpc_status",
    "cryptography",
    "structlog",
    "yaml",
    "prometheus_client",
    "typer",
    "rich",
)
MODEL = ("torch", "transformers", "safetensors", "tokenizers", "numba", "jinja2")
TESTS = ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis")
EXPORT = ("onnx", "onnxscript", "onnxruntime")

Need = Callable[[Facts, str], list[str]]
"""Returns a line for each thing missing for a device; the line starts with the thing's name."""


def modules(names: Iterable[str]) -> Need:
    """Return the need for these modules, each in a supported version."""
    names = tuple(names)

    def missing(facts: Facts, _device: str) -> list[str]:
        found = facts["modules"]
        lines = [f"{name}: not installed (pip install {MODULES[name]})" for name in names if found[name] is None]
        for name in names:
            if found[name] is not None and name in MIN_VERSIONS and _parsed(found[name]) < MIN_VERSIONS[name]:
                wanted = ".".join(map(str, MIN_VERSIONS[name]))
                lines.append(f"{name}: version {found[name]}, at least {wanted} is needed")
        return lines

    return missing


def gpu(facts: Facts, device: str) -> list[str]:
    """Need a GPU visible to torch, with bfloat16 tensor cores."""
    if device == "cpu":
        return []
    if facts["gpu"] is None:
        if facts["modules"]["torch"] is None:
            return []  # reported already
        driver = f"driver {facts['driver']}" if facts["driver"] else "no driver: nvidia-smi does not answer"
        return [f"a GPU: torch {facts['modules']['torch']} sees none ({driver}; torch must be a build for CUDA)"]
    if _parsed(facts["gpu"]["capability"]) < (8, 0):
        return [f"a newer GPU: {facts['gpu']['name']} has capability {facts['gpu']['capability']}, 8.0 is needed"]
    return []


def compiler(facts: Facts, device: str) -> list[str]:
    """Need the compiler and the headers with which Triton builds its launchers."""
    if device == "cpu":
        return []
    lines = [] if facts["c_compiler"] else ["a C compiler: Triton needs gcc or clang, or a path in CC"]
    return lines if facts["python_headers"] else [*lines, "Python.h: Triton needs Python's headers (python3-dev)"]


def cuda_provider(facts: Facts, device: str) -> list[str]:
    if device == "cpu" or "CUDAExecutionProvider" in facts["providers"]:
        return []
    return [
        "onnxruntime-gpu: this onnxruntime has no CUDAExecutionProvider (onnxruntime-gpu[cuda,cudnn] instead of it)"
    ]


def memory(gib: float) -> Need:
    """Return the need for this much free memory on the GPU."""

    def missing(facts: Facts, device: str) -> list[str]:
        if device == "cpu" or facts["gpu"] is None or facts["gpu"]["free_gib"] >= gib:
            return []
        return [f"memory: {facts['gpu']['free_gib']} GiB of the GPU are free, {gib:g} are needed"]

    return missing


def missing(needs: Iterable[Need], facts: Facts, device: str) -> list[str]:
    """Return a line for each missing thing, without duplicates."""
    return list(dict.fromkeys(line for need in needs for line in need(facts, device)))


def _parsed(version: str) -> tuple[int, ...]:
    """Return major and minor version; an unknown version counts as the newest."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (1 << 30, 0)
