"""Checks that a device is known and there, and computes in a dtype with a kind of engine.

torch is not imported for it: its version file says what it was built for, and the CUDA driver how many devices there
are.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
import runpy
from pathlib import Path
from typing import Any

from specdec.engine.engine import UnsupportedModelError
from specdec.engine.model_directory import DESCRIPTION, ModelDirectory, ModelDirectoryError
from specdec.engine.model_file import read_fields
from specdec.engine.placement import Placement

PACKAGES = {"torch": ("torch", "transformers", "numba"), "eager": ("torch", "transformers"), "onnx": ("onnxruntime",)}
"""Packages that each kind of engine wants, whatever the device."""

CUDA_DRIVER = "libcuda.so.1"


def check_placement(directory: ModelDirectory, placement: Placement, *, exported: bool) -> None:
    """Raise UnsupportedModelError or ModelDirectoryError unless a model can be placed so, ModuleNotFoundError if a
    package is missing that this takes."""
    number = cuda_number(placement.device)
    check_dtype(directory, placement, exported=exported)
    for package in PACKAGES[placement.kind]:
        require(package)
    if placement.kind == "onnx" and not exported and not installed("torch"):
        raise ModelDirectoryError(
            f"{directory.path}: not exported (no model.onnx), and without torch it cannot be exported here: "
            "run `specdec export` where torch is installed"
        )
    if number is not None and placement.kind != "onnx":  # ONNX Runtime tells of its providers by itself
        check_cuda(placement, number)


def cuda_number(device: str) -> int | None:
    """Return the number of a CUDA device, None for the CPU; UnsupportedModelError for a name that is neither."""
    found = re.fullmatch(r"cpu|cuda|cuda:(\d{1,4})", device)
    if found is None:
        raise UnsupportedModelError(f"device {device}: cpu, cuda and cuda:N are supported")
    return None if device == "cpu" else int(found[1] or 0)


def check_dtype(directory: ModelDirectory, placement: Placement, *, exported: bool) -> None:
    """Raise an error unless the kind of engine computes in the dtype on this device."""
    if placement.kind == "torch" and placement.device == "cpu" and placement.dtype == "float16":
        raise UnsupportedModelError(
            "dtype float16: is for GPUs; on the CPU the torch engine takes --dtype float32 or bfloat16"
        )
    if placement.kind == "onnx" and placement.dtype == "bfloat16":
        raise UnsupportedModelError("dtype bfloat16: the ONNX engine computes in float32 or float16, not bfloat16")
    description = read_fields(directory.path / DESCRIPTION) if exported else None
    made_in = description.content.get("dtype") if description is not None else None
    if isinstance(made_in, str) and placement.dtype not in (None, made_in):
        raise ModelDirectoryError(
            f"{directory.path}: exported in {made_in}, not {placement.dtype}; "
            f"`specdec export --dtype {placement.dtype}` makes another one"
        )


def check_cuda(placement: Placement, number: int) -> None:
    """Raise an error unless torch was built for CUDA and the device is there."""
    built = torch_build()
    if built.get("hip"):  # torch calls these devices cuda too, and their driver is another one
        return
    if not built.get("cuda"):
        raise UnsupportedModelError(
            f"device {placement.device}: torch {built.get('__version__')} is built for CPUs: install a CUDA build of it"
        )
    devices = cuda_devices()
    if isinstance(devices, str):
        raise UnsupportedModelError(f"device {placement.device}: {devices}")
    if number >= devices:
        raise UnsupportedModelError(
            f"device {placement.device}: there are {devices or 'no'} CUDA device{'s' * (devices > 1)}"
        )
    if placement.kind == "torch":
        require("triton")


def torch_build() -> dict[str, Any]:
    """Return what torch's version file says: `__version__`, `cuda`, `hip`; nothing without torch."""
    found = importlib.util.find_spec("torch") if installed("torch") else None
    if found is None or found.origin is None:
        return {}
    return runpy.run_path(str(Path(found.origin).with_name("version.py")))


def cuda_devices() -> int | str:
    """Return how many CUDA devices the driver sees; if it does not work, why."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return f"there is no CUDA driver here ({CUDA_DRIVER})"
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return f"the CUDA driver does not work (status {status})" if status else count.value


def require(package: str) -> None:
    """Raise ModuleNotFoundError if a package is not installed, as importing it would."""
    if not installed(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def installed(package: str) -> bool:
    """Return whether a package is installed; it is not imported."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False
