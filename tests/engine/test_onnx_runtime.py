"""ONNX Runtime's telemetry is off in every process: a single module loads the library and switches telemetry off."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("specdec", "draft_service", "verifier_service", "orchestrator", "evaluation", "bench", "testing", "tests")

FAKE = """
import os
seen = [os.environ.get("ORT_DISABLE_TELEMETRY")]

def disable_telemetry_events():
    seen.append("off")

class InferenceSession:
    def __init__(self, *_):
        seen.append("session")
"""


def _loads(path: Path) -> bool:
    """Return True if a statement of a file imports ONNX Runtime."""
    source = path.read_text()
    if "onnxruntime" not in source:
        return False
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names = [node.module]
        if any(name.split(".")[0] == "onnxruntime" for name in names):
            return True
    return False


def test_one_module_loads_it() -> None:
    paths = (path for name in FOLDERS for path in (ROOT / name).rglob("*.py"))
    assert [str(path.relative_to(ROOT)) for path in paths if _loads(path)] == ["specdec/engine/onnx_runtime.py"]


def test_it_is_off_before_the_library_is_loaded_and_before_any_session(tmp_path: Path) -> None:
    (tmp_path / "onnxruntime.py").write_text(FAKE)
    code = "from specdec.engine.onnx_runtime import ort; ort.InferenceSession(b''); print(*ort.seen)"
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))
    environment = {key: value for key, value in os.environ.items() if key != "ORT_DISABLE_TELEMETRY"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
        env=environment | {"PYTHONPATH": paths},
    )
    assert done.stdout.split() == ["1", "off", "session"]


@pytest.mark.parametrize("module", ["specdec.engine.onnx.engine", "specdec.engine.onnx.draft_logits"])
def test_the_real_library_leaves_nothing_in_the_users_cache(module: str, tmp_path: Path) -> None:
    """Official builds write a device id there when they are loaded, unless they detect a test run."""
    code = f"import {module}; from specdec.engine.onnx_runtime import ort; ort.get_available_providers()"
    kept = ("PATH", "LD_LIBRARY_PATH", "VIRTUAL_ENV")  # no variable that a test or CI sets
    environment = {name: os.environ[name] for name in kept if name in os.environ}
    environment |= {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(tmp_path), "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=environment)
    assert list(tmp_path.rglob("*onnxruntime*")) == []
