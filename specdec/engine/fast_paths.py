"""Fast paths of the engines in this process: which are off, why, and what that costs.

Nothing is imported for it: a path of a library that is not loaded says nothing, since nothing here runs on it. What
`off` returns is logged at start, shown by GetStats, and by `specdec doctor`.
"""

from __future__ import annotations

import platform
import sys
from typing import NamedTuple

from specdec.engine.cpu_count import cores_given

TESTED_TORCH = ("2.13.",)
"""Beginnings of the torch versions whose C functions were tested with the arguments that `cpu/packed_gemm.py` passes; a
C function cannot be asked for its signature. pyproject.toml allows no others."""


class FastPathOff(NamedTuple):
    """A fast path that is off."""

    name: str
    why: str
    cost: str

    def __str__(self) -> str:
        return f"{self.name}: off, {self.why}; {self.cost}"


def off() -> list[FastPathOff]:
    """Return the fast paths of the loaded engines that are off in this process."""
    return [] if "torch" not in sys.modules else [*_products(), *_team(), *_settled.values()]


def fast_paths_off() -> list[str]:
    """Return the fast paths that are off, each in a line: which, why, and what it costs."""
    return [str(each) for each in off()]


_settled: dict[str, FastPathOff] = {}
"""What the start found to be off, by the name of the path: it depends on the model and on options."""


def found_off(name: str, why: str, cost: str) -> None:
    """Note what only loading a model could tell."""
    _settled[name] = FastPathOff(name, why, cost)


def _products() -> list[FastPathOff]:
    """Packed oneDNN products, called from compiled code."""
    gemm = sys.modules.get("specdec.engine.cpu.packed_gemm")
    if gemm is None or gemm.AVAILABLE:
        return []
    version = sys.modules["torch"].__version__
    if not version.startswith(TESTED_TORCH):
        tested = " and ".join(f"{each}x" for each in TESTED_TORCH)
        why = f"torch {version} is not tested, {tested} is"
    else:
        why = f"this build of torch {version} lacks the C functions"
    return [
        FastPathOff(
            "one call a step", why, "each product is called from Python, which costs most where steps are short"
        )
    ]


def _team() -> list[FastPathOff]:
    """Compiled loops on torch's OpenMP team."""
    openmp = sys.modules.get("specdec.engine.cpu.openmp")
    if openmp is None or openmp.AVAILABLE or cores_given() == 1:
        return []
    why = f"torch has no GNU OpenMP interface on {platform.system()} {platform.machine()}"
    return [FastPathOff("OpenMP team", why, "attention and the loops between products use one thread")]
