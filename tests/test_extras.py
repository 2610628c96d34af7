"""A missing extra gives a one-line error with the package and its install command."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import typer

from specdec import cli
from specdec.extras import DISTRIBUTION, EXTRAS, HELD, NEEDED, command_from, install_command

ROOT = Path(__file__).parent.parent
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]

BLOCKING = """
import runpy, sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if any(name == module or name.startswith(module + ".") for module in {modules!r}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = {arguments!r}
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""A program that runs a module like `python -m`, with other modules made unavailable."""

DEMO = str(ROOT / "demo" / "target")
SERVING = ("--model", DEMO, "--port", "0")

OF_EXPORT = ("numpy", "structlog", "transformers", "onnx", "onnx_ir", "onnxscript")

PACKAGES = {"google.rpc": "googleapis-common-protos", "llvmlite": "numba", "yaml": "pyyaml"}
PACKAGES["onnx_ir"] = "onnx-ir"
PACKAGES["prometheus_client"] = "prometheus-client"
PACKAGES["opentelemetry"] = "opentelemetry-api"
PACKAGES["opentelemetry.sdk"] = "opentelemetry-sdk"
PACKAGES["opentelemetry.exporter"] = "opentelemetry-exporter-otlp-proto-grpc"
PACKAGES |= {name: name.replace("_", "io-") for name in EXTRAS if name.startswith("grpc_")}
PACKAGES |= {"grpc_health": "grpcio-health-checking"}
"""Module to distribution, where the names differ."""


def requirements(extra: str) -> set[str]:
    """Return the distributions required by an extra, including its nested extras."""
    found: set[str] = set()
    for line in PROJECT["optional-dependencies"][extra]:
        name = re.match(r"[\w-]+", line)
        assert name is not None
        inner = re.match(rf"{DISTRIBUTION}\[([\w,-]+)\]", line)
        found |= set().union(*map(requirements, inner[1].split(","))) if inner else {name[0]}
    return found


@pytest.mark.parametrize("module", sorted(EXTRAS))
def test_an_extra_brings_its_modules(module: str) -> None:
    wanted = PACKAGES.get(module, module)
    brought = requirements(EXTRAS[module])
    assert wanted in brought or (wanted == "googleapis-common-protos" and "grpcio-status" in brought)


def test_every_requirement_of_an_extra_has_its_module() -> None:
    named = {PACKAGES.get(module, module) for module in EXTRAS}
    for extra in PROJECT["optional-dependencies"]:
        if extra not in ("dev", "draft-gpu"):
            assert requirements(extra) <= named, extra


@pytest.mark.parametrize("extra", HELD)
def test_an_extra_brings_what_those_that_it_holds_bring(extra: str) -> None:
    for held in HELD[extra]:
        assert requirements(held) <= requirements(extra)
    brought = {module for module in EXTRAS if PACKAGES.get(module, module) in requirements(extra)}
    assert {module for module, least in EXTRAS.items() if least in HELD[extra]} >= brought


def test_extras_with_onnxruntime_exclude_the_one_for_gpus() -> None:
    found = {frozenset(each["extra"] for each in group) for group in SETTINGS["tool"]["uv"]["conflicts"]}
    assert found == {frozenset((extra, "draft-gpu")) for extra in HELD if "draft" in HELD[extra]}


def test_commands_that_need_an_extra_are_commands() -> None:
    assert set(vars(typer.main.get_command(cli.app))["commands"]) > set(NEEDED)


@pytest.mark.parametrize(
    ("module", "arguments", "extra"),
    [
        ("typer", ("specdec.cli", "generate", "x"), "cli"),
        ("rich", ("specdec.cli", "stats", "h:1"), "cli"),
        ("structlog", ("specdec.cli", "verifier", *SERVING), "verifier"),
        ("tokenizers", ("specdec.cli", "orchestrator", *SERVING, "--verifier", "h:1"), "orchestrator"),
        ("rich", ("specdec.cli", "export", DEMO, "/nonexistent/out"), "export"),
        ("torch", ("specdec.cli", "export", DEMO, "/nonexistent/out"), "export"),
        ("onnxruntime", ("specdec.cli", "export", DEMO, "/nonexistent/out", "--bits", "4"), "export"),
        ("rich", ("specdec.cli", "verifier", *SERVING), "verifier"),
        ("typer", ("specdec.cli", "up", "--target", DEMO), "all"),
        ("structlog", ("specdec.cli", "up", "--target", DEMO), "all"),
        ("torch", ("specdec.cli", "warm-up", "--model", DEMO), "verifier"),
        ("numpy", ("specdec.cli", "bench", "speed"), "dev"),
        ("rich", ("specdec.cli",), "cli"),
        ("typer", ("draft_service", *SERVING), "draft"),
        ("onnxruntime", ("draft_service", *SERVING), "draft"),
        ("opentelemetry", ("draft_service", *SERVING, "--otlp-endpoint", "h:1"), "otel"),
        ("torch", ("verifier_service", *SERVING), "verifier"),
        ("llguidance", ("orchestrator", *SERVING, "--verifier", "h:1"), "orchestrator"),
        ("jinja2", ("orchestrator", *SERVING, "--verifier", "h:1"), "orchestrator"),
        *(
            pytest.param(*case, marks=pytest.mark.verify)  # other modules of the same programs
            for case in (
                *((module, ("specdec.cli", "export", DEMO, "/nonexistent/out"), "export") for module in OF_EXPORT),
                ("numba", ("specdec.cli", "warm-up", "--model", DEMO), "verifier"),
                ("grpc_health", ("draft_service", *SERVING), "draft"),
                ("llguidance", ("draft_service", *SERVING), "draft"),
                ("numba", ("verifier_service", *SERVING), "verifier"),
                ("yaml", ("verifier_service", *SERVING), "verifier"),
                ("transformers", ("verifier_service", *SERVING), "verifier"),
                ("llguidance", ("verifier_service", *SERVING), "verifier"),
            )
        ),
    ],
)
def test_a_missing_module_is_one_line(module: str, arguments: tuple[str, ...], extra: str) -> None:
    program = BLOCKING.format(modules=[module], arguments=list(arguments))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.endswith(f"{module} is not installed: {install_command(extra)}\n"), done.stderr
    assert "Traceback" not in done.stderr
    assert sum(not line.startswith(("{", "20")) for line in done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("package", "extra"),
    [
        ("draft_service", "draft"),
        ("orchestrator", "orchestrator"),
        ("verifier_service", "verifier"),
        ("specdec.openai_api", "openai"),
    ],
)
def test_a_service_needs_no_more_than_its_extra(package: str, extra: str) -> None:
    """An image has only these modules."""
    missing = [module for module, least in EXTRAS.items() if least not in HELD[extra]]
    program = BLOCKING.format(modules=missing, arguments=[package, "--help"])
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, "pip install 'specdec-serve[draft]'"),
        ("broken", "pip install 'specdec-serve[draft]'"),
        ("[]", "pip install 'specdec-serve[draft]'"),
        ('{"url": "file:///a%20b/repo", "dir_info": {"editable": true}}', "pip install -e '/a b/repo[draft]'"),
        ('{"url": "file:///repo", "dir_info": {}}', "pip install '/repo[draft]'"),
        (
            '{"url": "file:///w/specdec_serve-1-py3-none-any.whl", "archive_info": {}}',
            "pip install 'specdec-serve[draft] @ file:///w/specdec_serve-1-py3-none-any.whl'",
        ),
        (
            '{"url": "https://h/u/specdec", "vcs_info": {"vcs": "git", "commit_id": "abc"}}',
            "pip install 'specdec-serve[draft] @ git+https://h/u/specdec@abc'",
        ),
        (
            '{"url": "https://h/u/all", "vcs_info": {"vcs": "git", "commit_id": "abc"}, "subdirectory": "a/b"}',
            "pip install 'specdec-serve[draft] @ git+https://h/u/all@abc#subdirectory=a/b'",
        ),
        ('{"url": "https://h/u/specdec", "vcs_info": {}}', "pip install 'specdec-serve[draft]'"),
    ],
)
def test_the_command_fits_how_this_was_installed(origin: str | None, command: str) -> None:
    assert command_from(origin, "draft") == command
