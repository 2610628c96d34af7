"""Checks that a device is present, that packages and compilers for a kind of engine are installed, and that one
process serves the whole model.

torch is not imported for this: its version file gives its build, and the CUDA driver gives the number of devices.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
import runpy
import shutil
from pathlib import Path
from typing import Any

from specdec.engine.model_directory import GRAPH, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError
from specdec.engine.placement import Placement
from specdec.engine.preflight.vllm_version import check_vllm
from specdec.engine.preflight.weights import tensors
from specdec.engine.unsupported import UnsupportedModelError

INSTALLS = "TORCH_INDUCTOR_INSTALL_GXX"
"""Environment variable that allows torch to install a compiler if it finds none."""


def check_compiler(placement: Placement) -> None:
    """Raise UnsupportedModelError if `--compile` is given for another engine or device than vLLM on a CPU, or without a
    C++ compiler."""
    if not placement.compiled:
        return
    if placement.kind != "vllm":
        raise UnsupportedModelError(
            f"--compile is for --engine vllm, not for {placement.kind}: leave out --compile, or use --engine vllm"
        )
    if placement.device != "cpu":
        raise UnsupportedModelError(f"--compile is for the CPU, not for device {placement.device}: leave out --compile")
    compiler = os.environ.get("CXX") or "g++"  # torch's search order
    if shutil.which(compiler) is None and not os.environ.get(INSTALLS):
        raise UnsupportedModelError(
            f"--compile: there is no C++ compiler {compiler} here: install g++, set CXX to another one, or leave out "
            "--compile"
        )


PACKAGES = {
    "torch": ("torch", "transformers", "numba"),
    "eager": ("torch", "transformers"),
    "onnx": ("onnxruntime",),
    "vllm": ("torch", "vllm", "numba"),
}
"""Packages required by each kind of engine, on any device."""

WORLD_SIZE = "WORLD_SIZE"
"""Environment variable set by torchrun to the number of processes."""

CUDA_DRIVER = "libcuda.so.1"

EXPERTS = ".experts."
"""Part of the names of the weights of a mixture's experts."""


def check_device(placement: Placement) -> None:
    """Raise UnsupportedModelError unless the device is present and supports the kind of engine; ModuleNotFoundError if
    a required package is missing."""
    number = cuda_number(placement.device)
    if placement.kind == "vllm":
        check_vllm()
    for package in PACKAGES[placement.kind]:
        require(package)
    if number is not None and placement.kind != "onnx":  # ONNX Runtime reports its own providers
        check_cuda(placement, number)


def is_exported(directory: ModelDirectory, placement: Placement) -> bool:
    """Return whether a model runs from a graph in its directory."""
    return placement.kind == "onnx" and (directory.path / GRAPH).is_file()


def check_placement(directory: ModelDirectory, placement: Placement) -> None:
    """Raise UnsupportedModelError or ModelDirectoryError unless the placement is possible; ModuleNotFoundError if a
    required package is missing."""
    check_device(placement)
    check_compiler(placement)
    check_weights_option(directory, placement)
    if placement.kind == "onnx" and not is_exported(directory, placement) and not installed("torch"):
        raise ModelDirectoryError(
            f"{directory.path}: not exported (no model.onnx), and torch is not installed here to export it: run "
            "`specdec export` on a machine with torch"
        )


def check_weights_option(directory: ModelDirectory, placement: Placement) -> None:
    """Raise UnsupportedModelError if weights cannot be quantised at start; ModuleNotFoundError if a package for it is
    missing."""
    if placement.weights == "stored":
        return
    subject = f"--weights {placement.weights}"
    if placement.kind != "torch" or placement.device != "cpu":
        raise UnsupportedModelError(
            f"{subject}: is for --engine torch on a CPU, not for {placement.kind} on {placement.device}; vLLM serves "
            "quantised checkpoints"
        )
    if directory.quantisation is not None:
        raise UnsupportedModelError(f"{subject}: {directory.name} is already quantised: leave the option out")
    # transformers loads the experts of a layer as one tensor, which is no linear layer.
    if any(EXPERTS in name for file in directory.weights() if file.suffix == ".safetensors" for name in tensors(file)):
        raise UnsupportedModelError(
            f"{subject}: does not quantise the experts of {directory.name}, which are most of its weights: leave the "
            "option out"
        )
    for package in ("onnxruntime", "onnx", "onnx_ir"):
        require(package)


def cuda_number(device: str) -> int | None:
    """Return the number of a CUDA device, None for the CPU; UnsupportedModelError for a name that is neither."""
    found = re.fullmatch(r"cpu|cuda|cuda:(\d{1,4})", device)
    if found is None:
        raise UnsupportedModelError(f"device {device}: cpu, cuda and cuda:N are supported")
    return None if device == "cpu" else int(found[1] or 0)


def check_cuda(placement: Placement, number: int) -> None:
    """Raise UnsupportedModelError unless torch was built for CUDA and the device is present; ModuleNotFoundError if the
    torch engine lacks Triton."""
    built = torch_build()
    if built.get("hip") and placement.kind == "vllm":  # torch calls ROCm's devices cuda too; vLLM checks them
        return
    if not built.get("cuda"):
        kind = "ROCm" if built.get("hip") else "CPU"
        raise UnsupportedModelError(
            f"device {placement.device}: torch {built.get('__version__')} is a {kind} build: install a CUDA build"
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
    """Return the contents of torch's version file: `__version__`, `cuda`, `hip`; empty without torch."""
    found = importlib.util.find_spec("torch") if installed("torch") else None
    if found is None or found.origin is None:
        return {}
    return runpy.run_path(str(Path(found.origin).with_name("version.py")))


def cuda_devices() -> int | str:
    """Return the number of CUDA devices seen by the driver, or the reason why it does not work."""
    try:
        driver = ctypes.CDLL(CUDA_DRIVER)
    except OSError:
        return f"there is no CUDA driver here ({CUDA_DRIVER})"
    count = ctypes.c_int()
    status = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return f"the CUDA driver does not work (status {status})" if status else count.value


def cuda_capability(number: int) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device, such as (8, 0); None if the driver does not provide it."""
    if isinstance(cuda_devices(), str):
        return None
    driver, device = ctypes.CDLL(CUDA_DRIVER), ctypes.c_int()
    if driver.cuDeviceGet(ctypes.byref(device), number):
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    for value, attribute in ((major, 75), (minor, 76)):  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR
        if driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, device):
            return None
    return major.value, minor.value


def require(package: str) -> None:
    """Raise ModuleNotFoundError if a package is not installed, as an import would."""
    if not installed(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def installed(package: str) -> bool:
    """Return whether a package is installed, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def check_launcher() -> None:
    """Raise UnsupportedModelError under a launcher of several processes: each would load and serve the whole model."""
    if (size := os.environ.get(WORLD_SIZE, "1")) != "1":
        raise UnsupportedModelError(
            f"{WORLD_SIZE} is {size}, as set by torchrun, but a verifier is one process: leave out torchrun, and for "
            "several GPUs use --engine vllm --vllm-options '{\"tensor_parallel_size\": N}'"
        )
