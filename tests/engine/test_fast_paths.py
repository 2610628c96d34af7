"""A disabled fast path is named, with the reason and its cost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401 (paths of an engine that is not loaded are not told)

from specdec.engine import fast_paths
from tests.captured_logs import captured_logs

ROOT = Path(__file__).parent.parent.parent


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = "from specdec.engine.fast_paths import fast_paths_off; print(*fast_paths_off(), sep='\\n')"


def test_nothing_is_said_of_what_is_not_loaded() -> None:
    assert printed(f"import sys; {SHOW}; assert 'torch' not in sys.modules") == ""


def test_a_torch_that_is_not_tested_is_named() -> None:
    """Matrix products are then called one by one; nothing fails."""
    said = printed(f"import torch; torch.__version__ = '2.99.0'; import specdec.engine.cpu.packed_gemm; {SHOW}")
    assert said.startswith("one call a step: off, torch 2.99.0 is untested; tested: 2.13.x; ")


def test_all_of_them_are_told_where_the_engine_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tested torch, products are on."""
    monkeypatch.setattr(fast_paths, "_settled", {})  # of models that other tests have loaded
    found = fast_paths.of_this_machine()
    assert list(found) == ["prepacked weights", "one call a step", "OpenMP team"]
    assert list(found) == [path.name for path in fast_paths.PATHS]
    assert [off for off in found.values() if off] == fast_paths.off()
    assert found["one call a step"] is None


@pytest.mark.verify
def test_a_torch_without_prepacked_products_is_named() -> None:
    """Like builds without oneDNN."""
    lacking = "import torch, types; torch.ops.mkldnn = types.SimpleNamespace()"
    said = printed(f"{lacking}; import specdec.engine.hf.linear; {SHOW}")
    assert said.startswith("prepacked weights: off, this build of torch 2.13.0")
    assert said.endswith("has no oneDNN; each matrix product repacks its weights")


def test_each_is_a_line_of_the_log() -> None:
    """Including paths found off only after loading a model."""
    fast_paths.found_off("test", "because", "time")
    try:
        with captured_logs() as lines:
            fast_paths.log_off()
    finally:
        fast_paths._settled.pop("test")
    assert {"event": "fast_path_off", "log_level": "warning", "path": "test", "why": "because", "cost": "time"} in lines
    assert len(lines) == len({line["path"] for line in lines})
