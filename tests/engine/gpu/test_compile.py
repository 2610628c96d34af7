"""The GPU kernels compile for their targets, without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the extra `cuda` is not installed")


@pytest.mark.verify
@pytest.mark.parametrize(
    ("capability", "dtype"),
    [
        ("90", "bf16"),
        ("80", "bf16"),
        ("80", "fp32"),
        ("90", "fp32"),
    ],
)
def test_kernels_compile(tmp_path: Path, capability: str, dtype: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.engine.gpu.compile_kernels", capability, dtype]
    done = subprocess.run(
        command,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        cwd=Path(__file__).parents[3],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
