"""Running compiled loops on torch's OpenMP team.

After a matrix product, the team's threads spin while they wait for the next one. Any other thread pool would compete
with them for the cores (`docs/decisions/2026-11-22-one-team.md`). So loops run on the same team, through the OpenMP
runtime that torch has loaded into the process.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch  # noqa: F401 - loads the runtime
from llvmlite import binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from specdec.engine.cpu.compiling import closed, part

Cuts = NDArray[np.int64]
"""The bounds [shares + 1] of a loop's shares: the start of each, and the end of the last."""

_process = ctypes.CDLL(None)
AVAILABLE = hasattr(_process, "GOMP_parallel")
"""True if the process has GNU's OpenMP interface, which LLVM's and Intel's runtimes provide too. Otherwise a loop runs
in the calling thread alone."""

if AVAILABLE:
    # Compiled code calls these by name: without addresses of this process, it can be cached for another one.
    for _name in ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads"):
        llvm.add_symbol(f"specdec.{_name}", ctypes.cast(getattr(_process, _name), ctypes.c_void_p).value)

# Arguments: function, its argument, number of threads, 0. Each thread runs the function. Addresses are integers.
_parallel = types.ExternalFunction(
    "specdec.GOMP_parallel", types.void(types.uintp, types.uintp, types.uint32, types.uint32)
)
_thread = types.ExternalFunction("specdec.omp_get_thread_num", types.int32())
"""The calling thread's number in the team."""
_team = types.ExternalFunction("specdec.omp_get_num_threads", types.int32())
"""Threads in the team: fewer than requested if the runtime has a limit."""


@functools.cache
def evenly(rows: int, threads: int, least: int) -> Cuts:
    """Cut rows into equal shares, one per thread; a single share if there is no OpenMP, or if there are fewer rows than
    threads or than `least`, the break-even for sharing. The result is cached and must not be written to."""
    shares = threads if AVAILABLE and rows >= max(least, threads) else 1
    return np.arange(shares + 1) * rows // shares


class SharedLoop:
    """A loop shared by the OpenMP team. Python calls this object; compiled code calls its `inside`."""

    def __init__(self, function: Callable[..., None], file: str) -> None:
        self.inside: Any = part()(function)
        self.outside: Any = closed(function.__qualname__, file)(function)

    def __call__(self, *arguments: Any) -> None:
        self.outside(*arguments)


def shared(*, scratch: int = 0, **options: Any) -> Callable[[Callable[..., None]], SharedLoop]:
    """Return a decorator that turns a loop(*arguments, cuts) over cuts[0] to cuts[1] into a shared loop. `options` go
    to `numba.njit`.

    The shared loop accepts any number of cuts. Each thread runs one share, or several if the team has fewer threads
    than shares. All threads see the same arrays.

    A loop must not allocate memory: a failed allocation in a team thread would go unnoticed, and that thread's results
    would be missing. Instead, the last `scratch` arguments before `cuts` (at most two) are scratch memory with a row
    per share; the loop gets the row of its share.
    """

    def decorate(function: Callable[..., None]) -> SharedLoop:
        plain = part(loop=True, **options)(function)

        def without(given: Any, _: Any, cuts: Any) -> None:
            plain(*given[:-1], cuts)

        def with_one(given: Any, number: Any, cuts: Any) -> None:
            plain(*given[:-2], given[-2][number], cuts)

        def with_two(given: Any, number: Any, cuts: Any) -> None:
            plain(*given[:-3], given[-3][number], given[-2][number], cuts)

        loop = part()((without, with_one, with_two)[scratch])

        def share(given: Any) -> None:
            """Run the calling thread's shares."""
            cuts = given[-1]
            # Strided by the actual team size: a team smaller than requested still covers all shares.
            for number in range(_thread(), len(cuts) - 1, _team()):
                loop(given, number, cuts[number : number + 2])

        @intrinsic  # type: ignore[untyped-decorator]
        def share_of(_context: Any, arguments: Any) -> Any:
            """Return the address of an LLVM function that reads the arguments and runs the calling thread's shares."""

            def generate(context: Any, builder: Any, signature: Any, _: Any) -> Any:
                own = types.void(signature.args[0])
                compiled = context.compile_subroutine(builder, share, own)
                kind = ir.FunctionType(ir.VoidType(), [ir.IntType(8).as_pointer()])
                function = ir.Function(builder.module, kind, builder.module.get_unique_name("specdec.share"))
                function.linkage = "internal"
                inside = ir.IRBuilder(function.append_basic_block())
                place = inside.bitcast(function.args[0], context.get_value_type(signature.args[0]).as_pointer())
                context.call_internal_no_propagate(inside, compiled.fndesc, own, [inside.load(place)])
                inside.ret_void()
                return builder.ptrtoint(function, ir.IntType(64))

            return types.uintp(arguments), generate

        def run(*arguments: Any) -> None:
            shares = len(arguments[-1]) - 1
            if shares == 1:
                loop(arguments, 0, arguments[-1])
            else:
                _parallel(share_of(arguments), _address(arguments), np.uint32(shares), np.uint32(0))

        def alone(*arguments: Any) -> None:
            loop(arguments, 0, arguments[-1])

        # Symbols are built from these names, which must be unique.
        whole = run if AVAILABLE else alone
        for loop_function in (share, whole):
            loop_function.__qualname__ = f"{loop_function.__name__}_{function.__qualname__}"
        return SharedLoop(whole, function.__code__.co_filename)

    return decorate


@intrinsic  # type: ignore[untyped-decorator]
def _address(_context: Any, arguments: Any) -> Any:
    """Return the address of memory that holds the arguments until the call ends."""

    def generate(_: Any, builder: Any, __: Any, values: Any) -> Any:
        return builder.ptrtoint(cgutils.alloca_once_value(builder, values[0]), ir.IntType(64))

    return types.uintp(arguments), generate
