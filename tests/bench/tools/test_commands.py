"""Every command in `bench/results` and in documents runs an existing benchmark with valid options."""

from __future__ import annotations

import contextlib
import io
import re
from functools import cache
from pathlib import Path

import pytest

from bench.__main__ import MODULES, main

ROOT = Path(__file__).parent.parent.parent.parent
COMMAND = re.compile(r"(?:python -m bench|specdec bench) ([a-z][a-z-]*)((?:[^\n\"`|]|\\\\\n)*)")
SOURCES = [
    *ROOT.glob("bench/results/*.json"),
    *ROOT.glob("docs/*.md"),
    *ROOT.glob("docs/benchmarks/*.md"),
    ROOT / "README.md",
]


@cache
def options(name: str) -> set[str]:
    """Return the options in a benchmark's help."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.suppress(SystemExit):
        main([name, "--help"])
    return set(re.findall(r"--[a-z][a-z0-9-]*", said.getvalue()))


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_run_benchmarks_that_exist(source: Path) -> None:
    for name, rest in COMMAND.findall(source.read_text(encoding="utf-8")):
        assert name in MODULES, f"{source}: {name}"
        unknown = set(re.findall(r"(?<=\s)--[a-z][a-z0-9-]*", rest)) - options(name)
        assert not unknown, f"{source}: {name} {unknown}"
