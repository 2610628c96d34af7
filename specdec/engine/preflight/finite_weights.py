"""A check of weight files for NaN and infinity: a diverged training run leaves files that are otherwise complete."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from specdec.engine.model_directory import ModelDirectory
from specdec.engine.model_file import ModelDirectoryError, opened
from specdec.engine.preflight.weights import tensors

EXPONENTS: dict[str, tuple[type[np.unsignedinteger[Any]], int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
}
"""Storage format -> unsigned integer of the same width, and the mask of its exponent bits. NaN and infinity have all of
these set. NumPy has no bfloat16."""

PIECE_BYTES = 16 << 20
"""Bytes checked at a time."""


def check_finite(directory: ModelDirectory) -> None:
    """Raise ModelDirectoryError, naming file and tensor, if a weight is NaN or infinite. Quantised weights and graphs
    are not checked. Reads all weights without keeping them."""
    for file in directory.weights():
        if file.suffix == ".safetensors":
            _check_file(file)


def _check_file(file: Path) -> None:
    entries = tensors(file)  # raises ModelDirectoryError for a truncated file
    with opened(file) as stream:
        begin = 8 + int.from_bytes(stream.read(8), "little")
        for name, entry in entries.items():
            if entry["dtype"] not in EXPONENTS:
                continue
            kind, exponent = EXPONENTS[entry["dtype"]]
            start, end = entry["data_offsets"]
            stream.seek(begin + start)
            left = end - start
            while left > 0 and (piece := stream.read(min(left, PIECE_BYTES))):
                bits = np.frombuffer(piece, kind, count=len(piece) // np.dtype(kind).itemsize)
                if ((bits & kind(exponent)) == kind(exponent)).any():
                    raise ModelDirectoryError(f"{file}: {name} has numbers that are not finite")
                left -= len(piece)
