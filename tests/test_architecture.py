"""Drift guards: who imports what, that every rpc is implemented, that the error table is total."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from draft_service.servicer import DraftServicer
from orchestrator.servicer import GenerationServicer
from specdec.serving import errors
from specdec.v2 import draft_pb2, generation_pb2, verifier_pb2
from verifier_service.servicer import VerifierServicer

ROOT = Path(__file__).parent.parent
SERVICES = ("draft_service", "verifier_service", "orchestrator")


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("specdec.client", ("torch", "numpy", "transformers", "structlog", "typer")),
        ("orchestrator.__main__", ("torch", "transformers", "onnxruntime")),
        ("draft_service.__main__", ("torch", "transformers")),
        ("specdec.engine.onnx.engine", ("torch", "transformers")),
        ("specdec.engine.cpu.engine", ("specdec.engine.gpu.attention", "specdec.engine.gpu.kernels")),  # Triton
        ("specdec.decoding.choice", ("torch", "grpc", "transformers")),
        ("specdec.decoding.tree", ("torch", "grpc", "numpy")),
    ],
)
def test_what_an_import_brings(module: str, banned: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(banned)!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


def test_arrows_point_one_way() -> None:
    """services -> specdec.serving, specdec.engine -> specdec.decoding; services never import each other."""
    for service in SERVICES:
        for path in (ROOT / service).rglob("*.py"):
            others = {name.split(".")[0] for name in _imports(path)} & (set(SERVICES) - {service})
            assert not others, f"{path} imports {others}"
    for path in (ROOT / "specdec").rglob("*.py"):
        package = path.relative_to(ROOT / "specdec").parts[0]
        imported = _imports(path)
        assert not {name.split(".")[0] for name in imported} & set(SERVICES), path
        if package == "decoding":
            assert not [n for n in imported if n.startswith("specdec.") and not n.startswith("specdec.decoding")], path
        if package == "engine":
            assert not [n for n in imported if n.startswith(("specdec.serving", "specdec.v2"))], path


@pytest.mark.parametrize(
    ("servicer", "descriptor"),
    [
        (DraftServicer, draft_pb2.DESCRIPTOR.services_by_name["DraftService"]),
        (VerifierServicer, verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]),
        (GenerationServicer, generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]),
    ],
)
def test_every_rpc_is_implemented(servicer: type, descriptor: object) -> None:
    methods = {method.name for method in descriptor.methods}  # type: ignore[attr-defined]
    assert methods
    assert methods <= set(vars(servicer))
    assert servicer.name == descriptor.full_name  # type: ignore[attr-defined]


def test_the_error_table_is_total() -> None:
    def subclasses(kind: type) -> set[type]:
        direct: set[type] = set(kind.__subclasses__())
        return direct.union(*(subclasses(child) for child in direct))

    assert subclasses(errors.ServiceError) == set(errors.STATUS)
    for kind in errors.STATUS:
        assert kind.__name__ in str(errors.__doc__)
