"""Which extra of this distribution brings which module, and what to tell where one is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.exit_status import ExitStatus

DISTRIBUTION = "specdec-serve"

EXTRAS = {
    "accelerate": "parallel",
    "gguf": "bench",
    "google.rpc": "service",
    "grpc_health": "cli",
    "grpc_reflection": "service",
    "grpc_status": "service",
    "jinja2": "orchestrator",
    "llvmlite": "verifier",
    "matplotlib": "bench",
    "numba": "verifier",
    "numpy": "service",
    "onnx": "export",
    "onnxruntime": "draft",
    "onnxscript": "export",
    "packaging": "cli",
    "rich": "cli",
    "safetensors": "verifier",
    "structlog": "service",
    "tokenizers": "orchestrator",
    "torch": "verifier",
    "transformers": "verifier",
    "triton": "cuda",
    "typer": "cli",
}
"""Module to the smallest extra that brings it."""

IN_EVERY_SERVICE = {"cli", "service"}
"""Extras that those of the services hold."""


def install_command(extra: str) -> str:
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def check_installed(*modules: str) -> None:
    """Raise ModuleNotFoundError for the first module that is not installed; nothing is imported."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hint(error: ModuleNotFoundError, role: str | None = None) -> str | None:
    """Return the line that names a missing module and the command which installs it; None if no extra brings it.

    `role` is the extra of the service that runs: it is named in place of one that all services have.
    """
    name = error.name or ""
    extra = EXTRAS.get(name) or EXTRAS.get(".".join(name.split(".")[:2])) or EXTRAS.get(name.partition(".")[0])
    if extra is None:
        return None
    if role is not None and extra in IN_EVERY_SERVICE:
        extra = role
    return f"{name.partition('.')[0]} is not installed: {install_command(extra)}"


@contextmanager
def needed_by(program: str, role: str | None = None) -> Iterator[None]:
    """Run what imports. If a module is missing that an extra brings, end the process with the hint on stderr;
    an interruption ends it without a word."""
    try:
        yield
    except ModuleNotFoundError as error:
        line = hint(error, role)
        if line is None:
            raise
        sys.exit(f"{program}: {line}")
    except KeyboardInterrupt:  # imports take seconds
        raise SystemExit(ExitStatus.INTERRUPTED) from None
