"""The extras of this distribution, the modules that they install, and the hint for a missing module."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from specdec.exit_status import ExitStatus

DISTRIBUTION = "specdec-serve"

EXTRAS = {
    "accelerate": "verifier",
    "cryptography": "service",
    "gguf": "verifier",
    "google.rpc": "service",
    "greenlet": "evaluate",
    "grpc_health": "cli",
    "grpc_reflection": "service",
    "grpc_status": "service",
    "jinja2": "grammar",
    "jiter": "orchestrator",
    "llguidance": "grammar",
    "llvmlite": "verifier",
    "matplotlib": "bench",
    "numba": "verifier",
    "numpy": "service",
    "onnx": "export",
    "onnx_ir": "export",
    "onnxruntime": "draft",
    "onnxscript": "export",
    "opentelemetry": "otel",
    "opentelemetry.exporter": "otel",
    "opentelemetry.sdk": "otel",
    "packaging": "cli",
    "prometheus_client": "service",
    "rich": "cli",
    "safetensors": "verifier",
    "structlog": "service",
    "tokenizers": "grammar",
    "torch": "verifier",
    "transformers": "verifier",
    "starlette": "openai",
    "triton": "cuda",
    "typer": "cli",
    "uvicorn": "openai",
    "yaml": "service",
}
"""For each module, the smallest extra that installs it."""

HELD = {"cli": frozenset({"cli"}), "service": frozenset({"cli", "service"})}
HELD["grammar"] = HELD["service"] | {"grammar"}
HELD |= {role: HELD["grammar"] | {role} for role in ("draft", "verifier", "orchestrator")}
HELD["export"] = HELD["draft"] | HELD["verifier"] | {"export"}
HELD["otel"] = HELD["service"] | {"otel"}
HELD["openai"] = HELD["service"] | {"openai"}
HELD["evaluate"] = HELD["draft"] | HELD["orchestrator"] | HELD["verifier"] | {"evaluate"}
HELD["all"] = HELD["evaluate"] | HELD["export"] | HELD["openai"]
HELD["dev"] = HELD["all"] | {"bench", "cuda", "otel"}
"""For each extra, the extras that it includes, and itself."""

NEEDED = {
    "draft": "draft",
    "verifier": "verifier",
    "warm-up": "verifier",
    "evaluate": "evaluate",
    "orchestrator": "orchestrator",
    "openai": "openai",
    "up": "all",
    "serve": "all",
    "export": "export",
    "import-gguf": "verifier",
    "train-draft": "verifier",
    "train-heads": "verifier",
    "bench": "dev",
}
"""For each command of `specdec`, a sufficient extra; for other commands it is `cli`."""


def needed_extra(arguments: Sequence[str]) -> str:
    """Return the extra sufficient for a command line of `specdec`."""
    command = next((argument for argument in arguments if not argument.startswith("-")), "")
    return NEEDED.get(command, "cli")


def install_command(extra: str) -> str:
    """Return the command that adds an extra to this installation, from the same source."""
    try:
        origin = importlib.metadata.distribution(DISTRIBUTION).read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        origin = None
    return command_from(origin, extra)


def command_from(origin: str | None, extra: str) -> str:
    """Return the command for an installation with this `origin`, in PEP 610's JSON: a checkout, a file or a repository.
    None: a package index."""
    try:
        direct_url = {} if origin is None else json.loads(origin)
        url = urllib.parse.urlsplit(direct_url.get("url", ""))
        editable, folder = direct_url.get("dir_info", {}).get("editable", False), "dir_info" in direct_url
        source = url.geturl()
        if "vcs_info" in direct_url:
            source = f"{direct_url['vcs_info']['vcs']}+{source}@{direct_url['vcs_info']['commit_id']}"
        if "subdirectory" in direct_url:
            source += f"#subdirectory={direct_url['subdirectory']}"
    except (ValueError, AttributeError, TypeError, KeyError):
        return f"pip install '{DISTRIBUTION}[{extra}]'"
    path = urllib.parse.unquote(url.path)
    if folder and url.scheme == "file":
        return f"pip install {'-e ' if editable else ''}'{path}[{extra}]'"
    if url.scheme:
        return f"pip install '{DISTRIBUTION}[{extra}] @ {source}'"
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def check_installed(*modules: str) -> None:
    """Raise ModuleNotFoundError for the first missing module, without importing any."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def hint(error: ModuleNotFoundError, needed: str | None = None) -> str | None:
    """Return the line with a missing module and the command to install it; None if no extra installs it.

    `needed` is the extra of the running program. If that extra includes the module, the line names that extra, because
    it also installs everything else that is missing.
    """
    name = error.name or ""
    extra = EXTRAS.get(name) or EXTRAS.get(".".join(name.split(".")[:2])) or EXTRAS.get(name.partition(".")[0])
    if extra is None:
        return None
    if needed is not None and extra in HELD[needed]:
        extra = needed
    return f"{name.partition('.')[0]} is not installed: {install_command(extra)}"


@contextmanager
def needed_by(program: str, needed: str | None = None) -> Iterator[None]:
    """Run imports. If a module of an extra is missing, end the process with the hint on stderr; an interruption ends it
    silently. `needed` is the extra of the program."""
    try:
        yield
    except ModuleNotFoundError as error:
        line = hint(error, needed)
        if line is None:
            raise
        sys.exit(f"{program}: {line}")
    except KeyboardInterrupt:  # imports take seconds
        raise SystemExit(ExitStatus.INTERRUPTED) from None
