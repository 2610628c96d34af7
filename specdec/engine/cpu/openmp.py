"""Compiled loops, shared among the OpenMP team that torch computes with.

After a matrix product the team's threads spin, waiting for the next one. Threads of any other pool would have to
compete with them for the cores (`docs/decisions/2026-11-22-one-team.md`). So loops are run by the same team, through
the OpenMP runtime that torch has loaded into the process.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch  # noqa: F401 - brings the runtime
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.imputils import impl_ret_borrowed
from numba.extending import intrinsic
from numpy.typing import NDArray

Cuts = NDArray[np.int64]
"""The bounds [shares + 1] of a loop's shares: where each begins, and the end of the last."""

_process = ctypes.CDLL(None)
AVAILABLE = hasattr(_process, "GOMP_parallel")
"""True if the process has GNU's OpenMP interface, which LLVM's and Intel's runtimes have as well. Without it a loop is
run by its caller alone."""

if AVAILABLE:
    # Called from compiled code, without the interpreter; addresses are integers.
    _parallel: Any = _process.GOMP_parallel  # (function, its argument, threads, 0): called by each thread
    _parallel.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint, ctypes.c_uint]
    _parallel.restype = None
    _thread: Any = _process.omp_get_thread_num  # the calling thread's number in the team
    _team: Any = _process.omp_get_num_threads  # threads in the team: fewer than asked for, if the runtime has a limit
    for _function in (_thread, _team):
        _function.argtypes = []
        _function.restype = ctypes.c_int


@functools.cache
def evenly(rows: int, threads: int, least: int) -> Cuts:
    """Cut rows into equal shares, one for each thread; into a single share if there are fewer rows than threads, or
    than `least`, from which sharing pays. The result is cached and must not be written to."""
    shares = threads if AVAILABLE and rows >= max(least, threads) else 1
    return np.arange(shares + 1) * rows // shares


def shared(loop: Any) -> Callable[..., None]:
    """Make a loop that the OpenMP team shares of a compiled loop(*arguments, cuts), which runs from cuts[0] to cuts[1].

    The new one takes any number of cuts, and each thread runs one share, or several if the team has fewer threads than
    shares. All threads see the same arrays.
    """
    if not AVAILABLE:
        return loop  # type: ignore[no-any-return]

    @intrinsic  # type: ignore[untyped-decorator]
    def share_of(_context: Any, arguments: Any) -> Any:
        """Return the address of the function that reads the arguments and runs its thread's shares."""

        @intrinsic  # type: ignore[untyped-decorator]
        def found(_context: Any, address: Any) -> Any:
            def load(context: Any, builder: Any, _: Any, values: Any) -> Any:
                kind = context.get_value_type(arguments).as_pointer()
                return impl_ret_borrowed(context, builder, arguments, builder.load(builder.bitcast(values[0], kind)))

            return arguments(address), load

        @numba.cfunc(types.void(types.voidptr))  # type: ignore[untyped-decorator]
        def share(address: Any) -> None:
            given = found(address)
            cuts = given[-1]
            for number in range(_thread(), len(cuts) - 1, _team()):
                loop(*given[:-1], cuts[number : number + 2])

        _kept.append(share)
        return types.uintp(arguments), lambda *_: ir.Constant(ir.IntType(64), share.address)

    @numba.njit(nogil=True)  # type: ignore[untyped-decorator]
    def run(*arguments: Any) -> None:
        shares = len(arguments[-1]) - 1
        if shares == 1:
            loop(*arguments)
        else:
            _parallel(share_of(arguments), _address(arguments), shares, 0)

    return run  # type: ignore[no-any-return]


_kept: list[Any] = []
"""Compiled functions whose addresses are in use; they are kept until the process ends."""


@intrinsic  # type: ignore[untyped-decorator]
def _address(_context: Any, arguments: Any) -> Any:
    """Return the address at which the arguments lie for the rest of the call."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), ir.IntType(64))

    return types.uintp(arguments), generate
