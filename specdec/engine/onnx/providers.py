"""ONNX Runtime's device: from a device name to execution providers.

A missing device is an error at start; there is no fallback to another device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.engine.unsupported import UnsupportedModelError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

CUDA_OPTIONS = {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
"""Options of the CUDA provider. It allocates memory only as needed, since the KV pools take most of it, and computes
float32 products in float32, not in TF32."""


class OnnxDevice(NamedTuple):
    """A device as ONNX Runtime names it."""

    kind: str  # cpu or cuda
    number: int


def parse_device(device: str) -> OnnxDevice:
    """Parse cpu, cuda or cuda:N; UnsupportedModelError for any other name."""
    found = re.fullmatch(r"(cpu|cuda)|cuda:(\d+)", device)
    if found is None:
        raise UnsupportedModelError(f"device {device}: the ONNX engine supports cpu, cuda, cuda:1, ...")
    return OnnxDevice(found[1] or "cuda", int(found[2] or 0))


def providers(device: OnnxDevice, available: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """Return the execution providers for a device, in order of preference: the CPU alone, or CUDA and then the CPU (for
    shape computations).

    `available` are the providers that the installed onnxruntime was built with; UnsupportedModelError if CUDA is needed
    and missing.
    """
    if device.kind == "cpu":
        return [(CPU, {})]
    if CUDA not in available:
        raise UnsupportedModelError(
            f"device cuda: this onnxruntime has no {CUDA}: replace onnxruntime with onnxruntime-gpu; only one can be "
            "installed (pip uninstall onnxruntime; pip install 'specdec-serve[draft-gpu]')"
        )
    return [(CUDA, {"device_id": str(device.number), **CUDA_OPTIONS}), (CPU, {})]


def check_started(device: OnnxDevice, started: Sequence[str]) -> None:
    """Raise UnsupportedModelError if a session runs without the requested provider: when CUDA's libraries are missing,
    onnxruntime falls back to the CPU."""
    if device.kind == "cuda" and started[0] != CUDA:
        raise UnsupportedModelError(
            f"device cuda:{device.number}: onnxruntime could not start its {CUDA}; driver, CUDA and cuDNN must match "
            "this build of onnxruntime-gpu (pip install 'onnxruntime-gpu[cuda,cudnn]')"
        )
