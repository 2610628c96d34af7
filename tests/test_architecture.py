"""Architecture guards: import rules, every rpc implemented, a total error table."""

from __future__ import annotations

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

from draft_service.servicer import DraftServicer
from orchestrator.servicer import GenerationServicer
from specdec.serving import errors
from specdec.serving.tracing.servicer import TraceServicer
from specdec.v2 import draft_pb2, generation_pb2, trace_pb2, verifier_pb2
from verifier_service.servicer import VerifierServicer

ROOT = Path(__file__).parent.parent
SERVICES = ("draft_service", "verifier_service", "orchestrator")


@pytest.mark.parametrize(
    ("module", "banned"),
    [
        ("specdec.client", ("torch", "numpy", "transformers", "structlog", "typer")),
        ("orchestrator.__main__", ("torch", "transformers", "onnxruntime")),
        ("draft_service.__main__", ("torch", "transformers")),
        ("specdec.openai_api.__main__", ("torch", "transformers", "onnxruntime", "tokenizers")),
        ("specdec.engine.onnx.engine", ("torch", "transformers")),
        ("specdec.engine.engines.cpu_engine", ("specdec.engine.gpu.attention", "specdec.engine.gpu.kernels")),  # Triton
        ("specdec.decoding.choice", ("torch", "grpc", "transformers")),
        ("specdec.decoding.tree", ("torch", "grpc", "numpy")),
        ("bench.systems.vllm", ("specdec", "numpy", "torch")),  # run by an interpreter with vLLM's environment only
    ],
)
def test_what_an_import_brings(module: str, banned: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(*sorted(set(sys.modules) & {set(banned)!r}))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.split() == []


@functools.cache
def _import_statements(path: Path) -> list[ast.Import | ast.ImportFrom]:
    """Return a file's imports, including those in functions and for types. Only statements are searched, since an
    expression contains no import."""
    found: list[ast.Import | ast.ImportFrom] = []
    ahead: list[ast.AST] = [ast.parse(path.read_text())]
    while ahead:
        node = ahead.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            found.append(node)
        for block in ("body", "orelse", "finalbody", "handlers", "cases"):
            ahead += getattr(node, block, [])
    return found


@functools.cache
def _imports(path: Path) -> frozenset[str]:
    found: set[str] = set()
    for node in _import_statements(path):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif node.module:
            found.add(node.module)
    return frozenset(found)


def test_arrows_point_one_way() -> None:
    """evaluation -> services -> specdec.serving, specdec.engine -> specdec.decoding. Services never import each
    other."""
    for service in SERVICES:
        for path in (ROOT / service).rglob("*.py"):
            others = {name.split(".")[0] for name in _imports(path)} & ({*SERVICES, "evaluation"} - {service})
            assert not others, f"{path} imports {others}"
    for path in (ROOT / "specdec").rglob("*.py"):
        package = path.relative_to(ROOT / "specdec").parts[0]
        imported = _imports(path)
        assert not {name.split(".")[0] for name in imported} & {*SERVICES, "evaluation"}, path
        if package == "decoding":
            assert not [n for n in imported if n.startswith("specdec.") and not n.startswith("specdec.decoding")], path
        if package == "engine":
            assert not [n for n in imported if n.startswith(("specdec.serving", "specdec.wire", "specdec.v2"))], path


def _module(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@functools.cache
def _import_graph() -> dict[str, set[str]]:
    """Return the import graph of the product's modules, including imports in functions and for types."""
    paths = [path for name in ("specdec", *SERVICES, "evaluation") for path in (ROOT / name).rglob("*.py")]
    known = {_module(path) for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        imported = graph.setdefault(_module(path), set())
        for node in _import_statements(path):
            if isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            else:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported |= known.intersection(names) - {_module(path)}
    return graph


def test_servers_import_nothing_of_the_client() -> None:
    """Code shared by both ends of the wire is in `specdec.wire`, which imports only the stubs."""
    graph = _import_graph()
    servers = (*SERVICES, "specdec.serving", "specdec.engine", "specdec.vllm")
    for module, imported in graph.items():
        if module.startswith(servers):
            assert not [name for name in imported if f"{name}.".startswith("specdec.client.")], module
        if module.startswith("specdec.wire"):
            assert not [name for name in imported if not name.startswith(("specdec.wire.", "specdec.v2"))], module


def _circle(graph: dict[str, set[str]]) -> set[str]:
    """Return the nodes of a graph left after repeatedly removing nodes without imports or importers: empty if
    acyclic."""
    left = set(graph)
    while left:
        imported = {other for name in left for other in graph[name] & left}
        free = {name for name in left if not graph[name] & left or name not in imported}
        if not free:
            break
        left -= free
    return left


def test_no_module_imports_itself_over_others() -> None:
    assert _circle(_import_graph()) == set()


def test_no_folder_imports_itself_over_others() -> None:
    """Folders form an acyclic graph; modules directly in a folder and its subfolders count as different folders."""
    folders: dict[str, set[str]] = {}
    for module, others in _import_graph().items():
        folder = _folder(module)
        folders.setdefault(folder, set()).update({_folder(other) for other in others} - {folder})
    assert _circle(folders) == set()


def _folder(module: str) -> str:
    """Return a module's folder; a package counts as its own folder."""
    return module if (ROOT / module.replace(".", "/")).is_dir() else module.rpartition(".")[0]


def _folders(*paths: Path) -> set[str]:
    """Return the top-level names imported by these files."""
    return {name.split(".")[0] for path in paths for name in _imports(path)}


def test_support_stands_below_tests_and_benchmarks() -> None:
    """tests -> testing <- bench -> demo; only tests of benchmarks import benchmarks, since shared support belongs in
    testing."""
    assert not _folders(*(ROOT / "testing").rglob("*.py")) & {"bench", "demo", "tests"}
    assert not _folders(*(ROOT / "demo").rglob("*.py")) & {"bench", "testing", "tests"}
    assert not _folders(*(ROOT / "bench").rglob("*.py")) & {"tests"}
    for path in (ROOT / "tests").rglob("*.py"):
        if "bench" not in path.relative_to(ROOT / "tests").parts and "bench" in path.read_text():
            assert "bench" not in _folders(path), path


def test_rooms_of_benchmarks_share_only_the_systems_under_test() -> None:
    for path in (ROOT / "bench").glob("*/*.py"):
        rooms = {name.split(".")[1] for name in _imports(path) if name.startswith("bench.")}
        rooms &= {room.name for room in (ROOT / "bench").iterdir() if room.is_dir()}
        assert rooms <= {path.parent.name, "systems"}, f"{path} imports {rooms}"


def _reached(module: str) -> set[str]:
    """Return the orchestrator modules imported by this one, directly or indirectly."""
    found, ahead = set[str](), [module]
    while ahead:
        imported = _imports(ROOT / f"{ahead.pop().replace('.', '/')}.py")
        new = {name for name in imported if name.startswith("orchestrator.")} - found
        found |= new
        ahead += new
    return found


PACKAGES = {
    "tenants": set[str](),
    "requests": {"tenants"},
    "text": {"requests"},
    "pods": {"requests"},
    "models": {"requests", "text", "pods"},
    "generation": {"requests", "text", "pods", "models"},
}
"""Packages of the orchestrator, lowest first, with the packages that each may import. Modules beside the packages may
import all packages, and no package imports these modules."""


def test_packages_of_the_orchestrator_import_only_lower_ones() -> None:
    folder = ROOT / "orchestrator"
    assert PACKAGES.keys() == {path.parent.name for path in folder.glob("*/__init__.py")}
    for package, lower in PACKAGES.items():
        for path in (folder / package).glob("*.py"):
            parts = {tuple(name.split(".")) for name in _imports(path)}
            imported = {name[1] if len(name) > 1 else "" for name in parts if name[0] == "orchestrator"}
            assert imported <= lower | {package}, f"{path} imports {imported}"


def test_verification_and_drafting_know_nothing_of_each_other() -> None:
    """Only `generation.py` imports both."""
    home = "orchestrator.generation"
    verification, drafting = _reached(f"{home}.verification"), _reached(f"{home}.drafting")
    assert f"{home}.verifier_stream" in verification
    assert not [name for name in verification if name.startswith(f"{home}.draft")]
    assert f"{home}.draft_session" in drafting
    assert not [name for name in drafting if name.startswith(f"{home}.verif")]
    both = {f"{home}.verification", f"{home}.drafting"}
    assert [path.stem for path in (ROOT / "orchestrator").rglob("*.py") if both <= _imports(path)] == ["generation"]


@pytest.mark.parametrize(
    ("servicer", "descriptor"),
    [
        (DraftServicer, draft_pb2.DESCRIPTOR.services_by_name["DraftService"]),
        (VerifierServicer, verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]),
        (GenerationServicer, generation_pb2.DESCRIPTOR.services_by_name["GenerationService"]),
        (TraceServicer, trace_pb2.DESCRIPTOR.services_by_name["TraceService"]),
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
