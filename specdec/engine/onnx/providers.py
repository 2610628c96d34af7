"""Where ONNX Runtime computes: from the device that was asked for to its execution providers.

What is asked for is what is run: a device that is not there is an error at start, never another device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from specdec.engine.engine import UnsupportedModelError

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

CUDA_OPTIONS = {"arena_extend_strategy": "kSameAsRequested", "use_tf32": "0"}
"""Take memory as it is needed, since the pools have most of it; float32 is float32, not what its shorter form gives."""


class Place(NamedTuple):
    """A device as ONNX Runtime names it."""

    kind: str  # cpu or cuda
    number: int


def place_of(device: str) -> Place:
    """cpu, cuda or cuda:N; UnsupportedModelError for any other."""
    found = re.fullmatch(r"(cpu|cuda)|cuda:(\d+)", device)
    if found is None:
        raise UnsupportedModelError(f"device {device}: the ONNX engine knows cpu, cuda, cuda:1, ...")
    return Place(found[1] or "cuda", int(found[2] or 0))


def providers(place: Place, available: Sequence[str]) -> list[tuple[str, dict[str, Any]]]:
    """In the order of preference: CUDA before the CPU, which computes shapes there, or the CPU alone.

    `available` are those that the installed onnxruntime was built with; UnsupportedModelError if what is wanted is not
    among them.
    """
    if place.kind == "cpu":
        return [(CPU, {})]
    if CUDA not in available:
        raise UnsupportedModelError(
            f"device cuda: this onnxruntime has no {CUDA}: put onnxruntime-gpu in place of onnxruntime, which it "
            "excludes (pip uninstall onnxruntime; pip install 'specdec[draft-gpu]')"
        )
    return [(CUDA, {"device_id": str(place.number), **CUDA_OPTIONS}), (CPU, {})]


def check_started(place: Place, started: Sequence[str]) -> None:
    """UnsupportedModelError if a session runs without the provider that was wanted: where CUDA's libraries are missing
    onnxruntime would go on with the CPU."""
    if place.kind == "cuda" and started[0] != CUDA:
        raise UnsupportedModelError(
            f"device cuda:{place.number}: onnxruntime could not start its {CUDA}; driver, CUDA and cuDNN must be "
            "those that this onnxruntime-gpu was built for (pip install 'onnxruntime-gpu[cuda,cudnn]')"
        )
