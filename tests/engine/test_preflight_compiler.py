"""`--compile` is refused at start where it cannot work, with the missing program."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from specdec.engine.engines.loading import load_engine
from specdec.engine.model_directory import ModelDirectory
from specdec.engine.placement import Placement
from specdec.engine.preflight.check import Wanted, check
from specdec.engine.preflight.compiler import INSTALLS, check_compiler
from specdec.engine.unsupported import UnsupportedModelError
from tests.models import make

COMPILED = Placement(dtype="float32", compiled=True)


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A machine without any program, and the means to change it."""
    for name in ("CXX", INSTALLS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return monkeypatch


def test_a_missing_compiler_is_named(bare: pytest.MonkeyPatch, tmp_path: Path) -> None:
    model = make("llama", tmp_path / "m")
    with pytest.raises(UnsupportedModelError, match=r"--compile: there is no C\+\+ compiler g\+\+ here: install g\+\+"):
        check(Wanted(model, COMPILED))
    bare.setenv("CXX", "clang++-99")
    with pytest.raises(UnsupportedModelError, match=r"compiler clang\+\+-99 here"):
        load_engine("torch", ModelDirectory(model), capacity=512, threads=(1,), dtype="float32", compiled=True)


def test_only_who_compiles_needs_one(bare: pytest.MonkeyPatch) -> None:
    check_compiler(Placement())


def test_one_that_is_named_or_brought_will_do(bare: pytest.MonkeyPatch) -> None:
    bare.setenv("CXX", sys.executable)
    check_compiler(COMPILED)
    bare.delenv("CXX")
    bare.setenv(INSTALLS, "1")
    check_compiler(COMPILED)


@pytest.mark.parametrize("placement", [Placement("eager", compiled=True), Placement(device="cuda", compiled=True)])
def test_only_the_torch_engine_on_the_cpu_compiles(placement: Placement) -> None:
    with pytest.raises(UnsupportedModelError, match="leave out --compile"):
        check_compiler(placement)
