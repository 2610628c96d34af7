"""Proves that a fast path which is off is named, with the reason and what it costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def printed(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


SHOW = "from specdec.engine.fast_paths import fast_paths_off; print(*fast_paths_off(), sep='\\n')"


def test_nothing_is_said_of_what_is_not_loaded() -> None:
    assert printed(f"import sys; {SHOW}; assert 'torch' not in sys.modules") == ""


def test_a_torch_that_is_not_tested_is_named() -> None:
    """The products are then called one by one; nothing fails."""
    said = printed(f"import torch; torch.__version__ = '2.99.0'; import specdec.engine.cpu.packed_gemm; {SHOW}")
    assert said.startswith("one call a step: off, torch 2.99.0 is not tested, 2.13.x is; ")


def test_with_the_tested_torch_products_are_on() -> None:
    assert "one call a step" not in printed(f"import specdec.engine.cpu.packed_gemm; {SHOW}")
