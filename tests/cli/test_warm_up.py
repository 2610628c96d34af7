"""`specdec warm-up` fills the cache folder with everything a start needs, or explains why it cannot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.engine.cache_folder import COMPILERS
from specdec.engine.hf.fingerprint import machine
from tests.models import make


def warm_up(model: Path, folder: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "specdec.cli", "warm-up", "--model", str(model), "--threads", "1"],
        env=os.environ | {"SPECDEC_CACHE_DIR": folder},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.verify
def test_what_a_start_needs_is_kept(tmp_path: Path) -> None:
    done = warm_up(make("opt", tmp_path), str(tmp_path / "cache"))
    assert (done.returncode, done.stdout) == (0, f"warm {tmp_path / 'cache'}\n"), done.stderr
    kinds = {each.name.partition("-")[0] for each in (tmp_path / "cache").iterdir()}
    kept = {"code", "exactness"} if machine() is not None else {"code"}
    assert kinds - set(COMPILERS.values()) == kept  # compilers may have made their own folders


def test_where_nothing_would_be_kept_it_fails_at_once(tmp_path: Path) -> None:
    done = warm_up(make("opt", tmp_path), "")
    assert done.returncode == 1
    assert "SPECDEC_CACHE_DIR" in done.stderr
    assert done.stdout == ""
