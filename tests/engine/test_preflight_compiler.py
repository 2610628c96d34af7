"""`--compile` is refused at start where it cannot work; the message names the missing program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Kind, Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.preflight.device import INSTALLS, check_compiler
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import make

COMPILED = Placement("vllm", "float32", compiled=True)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """Hide all programs of the machine; return the patch, so that tests can add some."""
    for name in ("CXX", INSTALLS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return monkeypatch


def test_a_missing_compiler_is_named(bare: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedModelError, match=r"--compile: there is no C\+\+ compiler g\+\+ here: install g\+\+"):
        check_compiler(COMPILED)
    bare.setenv("CXX", "clang++-99")
    with pytest.raises(UnsupportedModelError, match=r"compiler clang\+\+-99 here"):
        check_compiler(COMPILED)


def test_only_who_compiles_needs_one(bare: pytest.MonkeyPatch) -> None:
    check_compiler(Placement())


def test_one_that_is_named_or_brought_will_do(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CXX", sys.executable)
    check_compiler(COMPILED)
    bare.delenv("CXX")
    bare.setenv(INSTALLS, "1")
    check_compiler(COMPILED)


@pytest.mark.parametrize("kind", ["torch", "eager", "onnx"])
def test_other_engines_compile_no_model(kind: Kind, tmp_path: Path) -> None:
    model = make("llama", tmp_path / "m")
    reason = f"^--compile is for --engine vllm, not for {kind}: leave out --compile, or use --engine vllm$"
    placement = Placement(kind, "float32", compiled=True)
    with pytest.raises(UnsupportedModelError, match=reason):
        check(Wanted(model, placement))
    with pytest.raises(UnsupportedModelError, match=reason):
        load_engine(ModelDirectory(model), placement, threads=(1,))


def test_on_gpus_there_is_nothing_to_ask_for() -> None:
    with pytest.raises(UnsupportedModelError, match=r"^--compile is for the CPU, not for device cuda: leave out"):
        check_compiler(Placement("vllm", device="cuda", compiled=True))
