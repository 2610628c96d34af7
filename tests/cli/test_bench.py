"""`specdec bench` from a checkout works in any directory; without a checkout, the error says what is missing."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from specdec import cli
from specdec.roles import environment


def specdec(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specdec.cli", "bench", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, cwd=folder, env=environment())


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_it_lists_the_benchmarks(arguments: tuple[str, ...], tmp_path: Path) -> None:
    done = specdec(*arguments, folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert {"speed", "engine", "delay"} <= {line.split()[0] for line in done.stdout.splitlines() if line}


def test_an_unknown_benchmark_is_refused(tmp_path: Path) -> None:
    done = specdec("sped", folder=tmp_path)
    assert done.returncode == 2
    assert "unknown benchmark 'sped'" in done.stderr


def test_outside_a_checkout_it_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.import_module("specdec.cli.bench"), "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["specdec", "bench", "speed"])
    with pytest.raises(SystemExit) as ending:
        cli.main()
    assert ending.value.code == 1
    assert capsys.readouterr().err.startswith("specdec: benchmarks come with the source: ")
