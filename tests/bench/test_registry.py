"""The registry has every benchmark, and each can be run by its name."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

import bench
from bench.__main__ import MODULES, main

FOLDER = Path(bench.__file__).parent


def with_a_main(path: Path) -> bool:
    """Return whether a module has a `main` that takes a benchmark's arguments."""
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return any(function.name == "main" and len(function.args.args) == 1 for function in functions)


def test_every_benchmark_is_registered() -> None:
    modules = {
        ".".join(path.relative_to(FOLDER.parent).with_suffix("").parts)
        for path in FOLDER.rglob("*.py")
        if with_a_main(path) and path.name != "__main__.py"
    }
    assert modules == set(MODULES.values())


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_tells_its_options(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main([name, "--help"])
    assert ending.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m bench {name} [-h]")
    assert str(importlib.import_module(MODULES[name]).__doc__).splitlines()[0] in said


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("acceptance --prompts 0", "--prompts is 0, must be at least 1"),
        ("capacity --sessions 0", "--sessions is 0, must be at least 1"),
        ("chunking --rounds 0", "--rounds is 0, must be at least 1"),
        ("delay --streams 0", "--streams is 0, must be at least 1"),
        ("device --seconds 0", "--seconds is 0, must be at least 0.1"),
        ("drain --streams 0", "--streams is 0, must be at least 1"),
        ("http-overhead --rounds 0", "--rounds is 0, must be at least 1"),
        ("learning --texts 0", "--texts is 0, must be at least 1"),
        ("overload --bursts 0", "--bursts is 0, must be at least 1"),
        ("predictions --slower 0.5", "--slower is 0.5, must be at least 1"),
        ("prefix-routing --turns 3", "--turns is 3, must be at least 4"),
        ("production --features metric", "--features: metric is none of tls, keys, metrics, traces"),
        ("restarts --seconds nan", "--seconds is nan, must be at least 10"),
        ("start --warm 0", "--warm is 0, must be at least 1"),
        ("shares --texts 0", "--texts is 0, must be at least 1"),
        ("structured-output --streams 0", "--streams is 0, must be at least 1"),
        ("token-masks --texts 0", "--texts is 0, must be at least 1"),
        ("wire --tokens 1", "--tokens is 1, must be at least 2"),
    ],
)
def test_an_option_out_of_range_is_refused(given: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(given.split())
    assert ending.value.code == 2
    assert capsys.readouterr().err == f"python -m bench {given.split()[0]}: {problem} (--help lists the options)\n"


@pytest.mark.parametrize("given", [[], ["--help"], ["-h"], ["--list"]])
def test_they_are_listed(given: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    main(given)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:] if line] == list(MODULES)


def test_an_unknown_name_is_refused_with_those_there_are(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ending:
        main(["sped", "--quick"])
    assert ending.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("bench: unknown benchmark 'sped'; there are:\n\n")
    assert all(name in said.err for name in MODULES)
