"""Fast paths of this process's engines: which are off, why, and at what cost.

`off` imports nothing: it skips the paths of libraries that are not loaded, since no engine uses them. Its result is
logged at start and reported by GetStats. `of_this_machine` loads everything needed for the complete report of `specdec
doctor`.
"""

from __future__ import annotations

import importlib
import platform
import sys
from collections.abc import Callable
from typing import NamedTuple

from specdec.engine.cpu_count import cores_given

TESTED_TORCH = ("2.13.",)
"""Prefixes of the torch versions whose C functions were tested with the arguments in `cpu/packed_gemm.py`: signatures
of C functions cannot be inspected. pyproject.toml allows no other versions."""


class FastPathOff(NamedTuple):
    """A fast path that is off."""

    name: str
    why: str
    cost: str

    def __str__(self) -> str:
        return f"{self.name}: off, {self.why}; {self.cost}"


class FastPath(NamedTuple):
    """A fast path of the engine for CPUs, whether or not an installation supports it."""

    name: str
    module: str
    """The module that uses it."""
    why_off: Callable[[], str]
    """Returns why the path is off; empty if it is on. Called after the module is loaded."""
    cost: str

    @property
    def found(self) -> FastPathOff | None:
        """The path if it is off, else None."""
        why = self.why_off()
        return FastPathOff(self.name, why, self.cost) if why else None


def off() -> list[FastPathOff]:
    """Return the fast paths of the loaded engines that are off in this process."""
    loaded = [path.found for path in PATHS if path.module in sys.modules]
    return [*(found for found in loaded if found is not None), *_settled.values()]


def fast_paths_off() -> list[str]:
    """Return one line for each fast path that is off: its name, the reason, and the cost."""
    return [str(path) for path in off()]


def log_off() -> None:
    """Log one line for each fast path that is off."""
    import structlog  # services have it; `specdec doctor` works without

    for path in off():
        structlog.get_logger().warning("fast_path_off", path=path.name, why=path.why, cost=path.cost)


def of_this_machine() -> dict[str, FastPathOff | None]:
    """Load the engine for CPUs, and return its fast paths by name, with None for a path that is on. Raises ImportError
    if a package is missing or cannot be loaded."""
    for path in PATHS:
        importlib.import_module(path.module)
    return {path.name: path.found for path in PATHS}


_settled: dict[str, FastPathOff] = {}
"""Fast paths found to be off during the start, by name. They depend on the model and on options."""


def found_off(name: str, why: str, cost: str) -> None:
    """Record a fast path found to be off while loading a model."""
    _settled[name] = FastPathOff(name, why, cost)


def _prepacked() -> str:
    """Return why weights are not kept in oneDNN's own layout; empty if they are."""
    torch = sys.modules["torch"]
    if hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return ""
    return f"this build of torch {torch.__version__} has no oneDNN"


def _products() -> str:
    """Return why compiled code does not call oneDNN's prepacked products; empty if it does."""
    if sys.modules["specdec.engine.cpu.packed_gemm"].AVAILABLE:
        return ""
    version = sys.modules["torch"].__version__
    if version.startswith(TESTED_TORCH):
        return f"this build of torch {version} lacks oneDNN's C functions"
    return f"torch {version} is untested; tested: {', '.join(f'{tested}x' for tested in TESTED_TORCH)}"


def _team() -> str:
    """Return why compiled loops are not distributed over torch's OpenMP team; empty if they are, or if there is only
    one core."""
    if sys.modules["specdec.engine.cpu.openmp"].AVAILABLE or cores_given() == 1:
        return ""
    return f"torch has no GNU OpenMP interface on {platform.system()} {platform.machine()}"


PATHS = (
    FastPath(
        "prepacked weights",
        "specdec.engine.hf.linear",
        _prepacked,
        "each matrix product repacks its weights",
    ),
    FastPath(
        "one call a step",
        "specdec.engine.cpu.packed_gemm",
        _products,
        "each matrix product is called from Python, which costs most in short steps",
    ),
    FastPath(
        "OpenMP team",
        "specdec.engine.cpu.openmp",
        _team,
        "attention and the loops between matrix products use one thread",
    ),
)
"""In the order of reports."""
