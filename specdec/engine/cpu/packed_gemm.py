"""Prepacked GEMM: products with prepacked weights (`hf/linear.py`: `PackedLinear`), called from compiled code.

A call from Python takes five microseconds more, and releases and reacquires the GIL. torch exports the same operator as
a C function for programs built by its ahead-of-time compiler. Compiled loops call that function, so that all layers of
a step are one call (`docs/decisions/2026-11-23-one-call-a-step.md`). The function takes tensors as handles: addresses
of tensor objects, here as integers. Each handle keeps its tensor alive until it is released.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray
from torch import Tensor

from specdec.engine.cpu.arithmetic import Array
from specdec.engine.cpu.compiling import part
from specdec.engine.fast_paths import TESTED_TORCH
from specdec.engine.hf.linear import PackedLinear

Handles = NDArray[np.int64]

RESULTS = 2
"""Memory to reserve, as a multiple of a step's results: oneDNN's scratch memory is at most as large as one result."""

BESIDE_RESULTS = 1 << 20
"""Additional bytes to reserve, for handles and torch's own needs in a product."""

FUNCTIONS = ("aoti_torch_cpu__linear_pointwise", "aoti_torch_get_data_ptr", "aoti_torch_delete_tensor_object")


def _library() -> Any:
    """Return torch's library; None if its version is not tested or a function is missing."""
    if not torch.__version__.startswith(TESTED_TORCH):
        return None
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    except OSError:
        return None
    return library if all(hasattr(library, name) for name in FUNCTIONS) else None


_torch = _library()
AVAILABLE = _torch is not None

if AVAILABLE:
    # Compiled code calls these by name, so that it can be cached.
    for _name in FUNCTIONS:
        llvm.add_symbol(f"specdec.{_name}", ctypes.cast(getattr(_torch, _name), ctypes.c_void_p).value)
    _delete: Any = _torch.aoti_torch_delete_tensor_object
    _delete.argtypes, _delete.restype = [ctypes.c_size_t], ctypes.c_int32

# Addresses are integers. All functions return 0 on success.
_linear = types.ExternalFunction(  # x, weight, &bias, name, 0, 0, &algorithm, &result
    "specdec.aoti_torch_cpu__linear_pointwise",
    types.int32(*[types.uintp] * 5, types.int64, types.uintp, types.uintp),
)
_data = types.ExternalFunction(  # tensor, &pointer to its data
    "specdec.aoti_torch_get_data_ptr", types.int32(types.uintp, types.uintp)
)
_give_back = types.ExternalFunction("specdec.aoti_torch_delete_tensor_object", types.int32(types.uintp))

_nothing_after = ctypes.create_string_buffer(b"none"), (ctypes.c_char_p * 1)(b"")
_NOTHING_AFTER = np.asarray([ctypes.addressof(buffer) for buffer in _nothing_after], dtype=np.int64)


class Products(NamedTuple):
    """Arrays for the products of all layers, read by compiled code. Each layer has one product of each kind; all
    products of a kind read the same input."""

    weights: Handles  # [layers * kinds]
    biases: Handles  # [layers * kinds] addresses of handles; 0: no bias
    inputs: Handles  # [tiles of all kinds]
    rows: NDArray[np.int64]  # [tiles of all kinds]
    first: NDArray[np.int64]  # [kinds + 1] first tile of each kind
    outputs: NDArray[np.int64]  # [kinds] columns of the results
    results: Handles  # [kinds] the latest result; 0: none yet
    address: NDArray[np.int64]  # [1] address of the last result's data
    nothing_after: NDArray[np.int64]  # [2] addresses of the post-op's name ("none") and its algorithm
    together: Array  # in the inputs' stored dtype: room for any result, if a kind has several tiles


class References:
    """Handles to tensors. The tensors live as long as this object."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        capsules = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(list(tensors))
        self.handles: Handles = np.asarray([_pointer(capsule, None) for capsule in capsules], dtype=np.int64)
        _give_back_after(self, self.handles)


class TiledInputs:
    """The inputs of products: for each kind a tensor [t, inputs], cut into tiles of the given row counts."""

    def __init__(self, inputs: Sequence[Tensor], tiles: Sequence[Sequence[int]]) -> None:
        parts = [part for tensor, sizes in zip(inputs, tiles, strict=True) for part in torch.split(tensor, list(sizes))]
        self._references = References(parts)
        self.handles = self._references.handles
        self.rows = np.asarray([len(part) for part in parts], dtype=np.int64)
        self.first = np.cumsum([0, *map(len, tiles)])
        self.whole = all(len(sizes) == 1 for sizes in tiles)


class PackedGemm:
    """The prepacked GEMMs of a model's linear layers, `kinds` per decoder layer, in order."""

    def __init__(self, linears: Sequence[PackedLinear], kinds: int) -> None:
        biases = [linear.bias for linear in linears]
        self._weights = References([linear.weight for linear in linears])
        self._biases = References([bias for bias in biases if bias is not None])
        places = iter(self._biases.handles.ctypes.data + 8 * np.arange(len(self._biases.handles)))
        self._places = np.asarray([0 if bias is None else next(places) for bias in biases], dtype=np.int64)
        self._outputs = np.asarray([linear.out_features for linear in linears[:kinds]], dtype=np.int64)
        self._results, self._address = np.zeros(kinds, dtype=np.int64), np.zeros(1, dtype=np.int64)
        self._together: Array = np.empty(0, np.float32)
        _give_back_after(self, self._results)

    @classmethod
    def fitting(cls, linears: Sequence[Any], kinds: int) -> PackedGemm | None:
        """Return the prepacked GEMMs of these layers; None if a layer is not prepacked, if layers of a kind differ in
        shape, or if this torch is not supported."""
        packed = [linear for linear in linears if isinstance(linear, PackedLinear)]
        shapes = [(linear.in_features, linear.out_features) for linear in packed]
        alike = all(shape == shapes[number % kinds] for number, shape in enumerate(shapes))
        return cls(packed, kinds) if AVAILABLE and alike and len(packed) == len(linears) else None

    def of(self, inputs: TiledInputs, like: Array) -> Products:
        """Return the products of these inputs, with the row count and stored dtype of `like`. They are valid only while
        this object and the inputs exist, since compiled code keeps no references."""
        _reserve(RESULTS * len(like) * int(self._outputs.sum()) * like.itemsize + BESIDE_RESULTS)
        numbers = 0 if inputs.whole else len(like) * int(self._outputs.max())
        if len(self._together) < numbers or self._together.dtype != like.dtype:
            self._together = np.empty(numbers, like.dtype)
        return Products(
            self._weights.handles,
            self._places,
            inputs.handles,
            inputs.rows,
            inputs.first,
            self._outputs,
            self._results,
            self._address,
            _NOTHING_AFTER,
            self._together,
        )


def _reserve(size: int) -> None:
    """Make malloc obtain `size` bytes from the system and keep them free (`memory.py`: `keep_freed_memory`);
    MemoryError if it cannot. Without this, when a product runs out of memory, torch allocates more to describe the
    error, and the process ends by SIGSEGV."""
    np.empty(size, np.uint8)


def _give_back_after(owner: object, handles: Handles) -> None:
    """Release the handles when their owner is gone. At process exit they are left to the system, because a step may
    still be running."""
    weakref.finalize(owner, _give_all_back, handles).atexit = False


def _give_all_back(handles: Handles) -> None:
    for handle in handles[handles != 0].tolist():
        _delete(handle)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.argtypes, _pointer.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p


@intrinsic  # type: ignore[untyped-decorator]
def _pointer_to(_context: Any, address: Any) -> Any:
    def generate(_: Any, builder: Any, __: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], ir.IntType(8).as_pointer())

    return types.voidptr(address), generate


@part()
def product(products: Any, number: Any) -> Any:
    """Compute product `number`, [t, outputs] in the stored dtype. The result is valid until the next product."""
    kind = number % len(products.outputs)
    begin, end, columns = products.first[kind], products.first[kind + 1], products.outputs[kind]
    if end - begin == 1:
        return _tile(products, number, kind, begin)
    rows = 0
    for tile in range(begin, end):
        rows += products.rows[tile]
    together = products.together[: rows * columns].reshape(rows, columns)
    done = 0
    for tile in range(begin, end):
        result = _tile(products, number, kind, tile)
        for row in range(len(result)):  # whole-array assignment takes seconds to compile
            for column in range(columns):
                together[done + row, column] = result[row, column]
        done += len(result)
    return together


@part()
def _tile(products: Any, number: Any, kind: Any, tile: Any) -> Any:
    """Compute one tile of a product. The result is valid until the next tile of its kind."""
    result = products.results[kind : kind + 1]
    if result[0]:
        _give_back(np.uintp(result[0]))
        result[0] = 0
    x, weight, bias = products.inputs[tile], products.weights[number], products.biases[number]
    name, algorithm = products.nothing_after[0], products.nothing_after[1]
    failed = _linear(
        np.uintp(x),
        np.uintp(weight),
        np.uintp(bias),
        np.uintp(name),
        np.uintp(0),
        np.int64(0),
        np.uintp(algorithm),
        np.uintp(result.ctypes.data),
    )
    if failed or _data(np.uintp(result[0]), np.uintp(products.address.ctypes.data)):
        raise RuntimeError("a matrix product has failed: out of memory")
    return numba.carray(
        _pointer_to(products.address[0]), (products.rows[tile], products.outputs[kind]), products.together.dtype
    )
