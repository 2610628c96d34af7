"""ONNX Runtime, with its telemetry off. Every module of the product that uses it imports it from here.

Official builds repeatedly write a device id to the user's cache and look up a host of the vendor. The environment
variable turns all of this off, if it is set before the library is loaded. In builds that do not know it, the function
call turns off telemetry events.
"""

from __future__ import annotations

import os
from typing import Any

os.environ["ORT_DISABLE_TELEMETRY"] = "1"  # for child processes too

import onnxruntime as ort

ort.disable_telemetry_events()

__all__ = ["block_quantizer", "ort"]


def block_quantizer(block: int, bits: int) -> Any:
    """Return the library's own quantiser of weights: `bits` per value, in blocks of `block` values, with zero
    points."""
    from onnxruntime.quantization.matmul_nbits_quantizer import (
        DefaultWeightOnlyQuantConfig,
        DefaultWeightOnlyQuantizer,
    )

    return DefaultWeightOnlyQuantizer(DefaultWeightOnlyQuantConfig(block_size=block, is_symmetric=False, bits=bits))
