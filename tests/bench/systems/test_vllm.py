"""Threads of vLLM, as an engine and as a separate process."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from bench.systems.system import Setup
from bench.systems.vllm import openmp, options_of, threads_of

SETUP = Setup(Path("target"), None, "float32", streams=4, context=64)


def test_threads_have_a_core_each(tmp_path: Path) -> None:
    assert openmp(tmp_path, 1) == {}  # without Intel's OpenMP, torch's own is used
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libiomp5.so").touch()
    variables = openmp(tmp_path, 1)
    assert variables["OMP_NUM_THREADS"] == "1"
    assert f"proclist=[{min(os.sched_getaffinity(0))}]" in variables["KMP_AFFINITY"]
    assert variables["LD_PRELOAD"].startswith(str(tmp_path / "lib" / "libiomp5.so"))


def test_a_draft_service_gets_a_core_unless_threads_are_given() -> None:
    cores = len(os.sched_getaffinity(0))
    assert threads_of(SETUP) == cores
    assert threads_of(SETUP, spared=1) == max(1, cores - 1)
    given = replace(SETUP, threads=1)
    assert threads_of(given) == threads_of(given, spared=1) == 1
    assert options_of(given, threads_of(given))[-2:] == ["--threads", "1"]
