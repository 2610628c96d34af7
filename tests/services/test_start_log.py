"""A service that starts says which fast paths are off, each in one line of its log."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.roles import environment
from tests.services.conftest import Directories

ROOT = Path(__file__).parents[2]

PROGRAM = """
import sys
from specdec.engine import fast_paths
fast_paths.found_off("test", "it is off here", "it costs nothing")
from specdec.command_line import run_command
from {package}.__main__ import main
run_command(main, "service", sys.argv[1:])
"""


@pytest.mark.parametrize("package", ["verifier_service", "draft_service"])
def test_what_is_off_is_one_line_each(directories: Directories, package: str) -> None:
    options = ("--model", str(directories.near), "--engine", "torch", "--threads", "1", "--port", "0")
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(package=package), *options, "--stop-with-stdin"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env=environment(),
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready ")
    finally:
        _, errors = process.communicate(timeout=60)  # closes stdin
    lines = [json.loads(line) for line in errors.splitlines() if line.startswith("{")]
    told = [line for line in lines if line["event"] == "fast_path_off"]
    (line,) = [each for each in told if each["path"] == "test"]
    assert (line["why"], line["cost"], line["level"]) == ("it is off here", "it costs nothing", "warning")
    assert len(told) == len({each["path"] for each in told})
