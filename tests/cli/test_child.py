"""A service as a child process: what its parent learns of its start."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specdec.local.child import Child, LocalError, stop


def test_the_address_is_awaited() -> None:
    child = Child.start("service", "-c", "print('starting late'); print('ready here:1', flush=True); input()")
    try:
        assert child.until_ready(60) == "here:1"
    finally:
        stop([child])


@pytest.mark.parametrize(
    ("code", "seconds", "why"),
    [
        ("raise SystemExit(3)", 60, "service did not start: exit status 3"),
        ("input()", 0, "service is not ready after 0 s"),
    ],
)
def test_a_service_that_is_not_ready_is_refused_with_the_reason(code: str, seconds: float, why: str) -> None:
    child = Child.start("service", "-c", code)
    try:
        with pytest.raises(LocalError, match=re.escape(why)):
            child.until_ready(seconds)
    finally:
        stop([child])


def test_a_service_runs_no_files_of_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "queue.py").write_text("open('executed', 'w')")
    (tmp_path / "orchestrator").mkdir()
    (tmp_path / "orchestrator" / "__main__.py").write_text("open('executed', 'w')")
    monkeypatch.chdir(tmp_path)
    child = Child.start("service", "-m", "orchestrator", "--help")
    try:
        assert child.process.wait(60) == 0
    finally:
        stop([child])
    assert not (tmp_path / "executed").exists()
