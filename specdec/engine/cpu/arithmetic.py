"""Arithmetic shared by all compiled CPU loops: conversion between stored and computed numbers, and exp.

The KV cache, weights and intermediate results may be bfloat16, which NumPy sees as raw bits (uint16). All arithmetic is
float32.
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

NUMBA = f"{numba.__version__}-{llvm.get_host_cpu_name()}"
"""Numba's version and the loops' target processor: other versions or processors may sum in another order."""

REORDERED = {"reassoc", "contract", "nsz", "arcp"}
"""LLVM's fast-math flags. The compiler may reorder a sum, but the compiled order is fixed; infinities and NaNs keep
their meaning."""


Array = np.ndarray[Any, Any]


def array_of(tensor: Tensor) -> Array:
    """Return the tensor's memory as an array: float32, or bfloat16 as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


@intrinsic  # type: ignore[untyped-decorator]
def widened(_context: Any, stored: Any) -> Any:
    """Convert a stored number to float32: unchanged, or the bits of a bfloat16 followed by sixteen zeros."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        (number,) = arguments
        if signature.args[0] == types.float32:
            return number
        bits = builder.shl(builder.zext(number, ir.IntType(32)), ir.Constant(ir.IntType(32), 16))
        return builder.bitcast(bits, ir.FloatType())

    return types.float32(stored), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrowed(_context: Any, number: Any, like: Any) -> Any:
    """Convert a float32 to the stored type of `like`: unchanged, or the nearest bfloat16, ties to even."""

    def generate(_: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if signature.return_type == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        half = builder.lshr(bits, ir.Constant(word, 16))
        odd = builder.and_(half, ir.Constant(word, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(word, 0x7FFF))), ir.Constant(word, 16))
        is_nan = builder.fcmp_unordered("uno", arguments[0], arguments[0])
        quiet = builder.or_(half, ir.Constant(word, 0x40))  # rounding could turn a NaN into an infinity
        return builder.trunc(builder.select(is_nan, quiet, rounded), ir.IntType(16))

    return like(types.float32, like), generate


@intrinsic  # type: ignore[untyped-decorator]
def _from_bits(_context: Any, bits: Any) -> Any:
    """Return the float32 with these bits (int32)."""

    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), generate


@numba.njit(inline="always", fastmath=REORDERED)  # type: ignore[untyped-decorator]
def exp(x: Any) -> Any:
    """Return e**x for x <= 0, accurate to five units in the last place (after Cephes' expf: a power of two times a
    polynomial). Loops that call it can be vectorised."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    whole = np.floor(x * np.float32(1.44269504) + np.float32(0.5))
    rest = x - whole * np.float32(0.693359375) - whole * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * rest + np.float32(1.3981999507e-3)
    p = p * rest + np.float32(8.3334519073e-3)
    p = p * rest + np.float32(4.1665795894e-2)
    p = p * rest + np.float32(1.6666665459e-1)
    p = p * rest + np.float32(5.0000001201e-1)
    p = p * rest * rest + rest + np.float32(1.0)
    return p * _from_bits((np.int32(whole) + np.int32(127)) << np.int32(23))
