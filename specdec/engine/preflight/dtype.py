"""The dtype in which a model computes: the requested one, or else the most suitable."""

from __future__ import annotations

from collections.abc import Callable

from specdec.engine.model_directory import DESCRIPTION, GRAPH, ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, read_fields
from specdec.engine.placement import BYTES, Dtype, Placement
from specdec.engine.preflight.device import cuda_capability, cuda_number
from specdec.engine.processor import computes_bfloat16
from specdec.engine.unsupported import UnsupportedModelError

CAPABILITY_OF_BFLOAT16 = (8, 0)
"""Compute capability of NVIDIA's first GPUs with bfloat16 arithmetic (Ampere)."""


def computes_bfloat16_on(device: str) -> bool:
    """Return whether a device has bfloat16 arithmetic; True if unknown."""
    number = cuda_number(device)
    if number is None:
        return computes_bfloat16()
    capability = cuda_capability(number)
    return capability is None or capability >= CAPABILITY_OF_BFLOAT16


def dtype_of(
    directory: ModelDirectory, placement: Placement, has_bfloat16: Callable[[str], bool] = computes_bfloat16_on
) -> Dtype:
    """Return the dtype that a model computes in.

    "auto" means the checkpoint's own dtype if the device computes well in it, else float32; for an export, the export's
    dtype. `has_bfloat16`: whether a device has bfloat16 arithmetic. Raises UnsupportedModelError or ModelDirectoryError
    if the requested dtype is impossible.
    """
    wanted = placement.dtype
    exported = _exported_in(directory) if placement.kind == "onnx" else None
    if wanted == "auto":
        if exported is not None:
            return exported
        own, on_gpu = _known(directory.dtype), cuda_number(placement.device) is not None
        if own == "bfloat16":
            return own if placement.kind != "onnx" and has_bfloat16(placement.device) else "float32"
        return own if own is not None and on_gpu else "float32"
    if placement.kind == "torch" and placement.device == "cpu" and wanted == "float16":
        raise UnsupportedModelError(
            "dtype float16: is for GPUs; on the CPU the torch engine supports --dtype float32 and bfloat16"
        )
    if placement.kind == "onnx" and wanted == "bfloat16":
        raise UnsupportedModelError("dtype bfloat16: the ONNX engine supports float32 and float16, not bfloat16")
    if exported not in (None, wanted):
        raise ModelDirectoryError(
            f"{directory.path}: exported in {exported}, not {wanted}; run `specdec export --dtype {wanted}`"
        )
    return wanted


def _exported_in(directory: ModelDirectory) -> Dtype | None:
    """Return the dtype of an exported model; None if the directory contains none, or its description is damaged."""
    if not (directory.path / GRAPH).is_file():
        return None
    description = read_fields(directory.path / DESCRIPTION)
    return None if description is None else _known(description.content.get("dtype"))


def _known(name: object) -> Dtype | None:
    return next((dtype for dtype in BYTES if dtype == name), None)
