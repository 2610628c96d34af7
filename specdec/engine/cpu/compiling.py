"""How Numba compiles our loops. Functions called from Python become closed pieces of code; functions called only from
compiled code become parts of their callers.

Numba emits machine code for every function that a loop calls, and at run time the first loaded version of a function
wins. So code compiled in this process and the same code from the cache folder could run different versions of an inner
loop, which may add in different orders. A closed piece runs its own version of everything, so it gives the same bits in
both cases. Parts need no machine code of their own, which saves much of the compile time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite.binding import Linkage
from numba.core.codegen import JITCodeLibrary
from numba.core.compiler import CompilerBase, DefaultPassBuilder
from numba.core.compiler_machinery import register_pass
from numba.core.typed_passes import NativeLowering

from specdec.engine.cpu.code_cache import kept


def closed(name: str, file: str | None = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function as a closed piece of code, with these options of `numba.njit`, and
    keeps it in the cache folder. `name` must be unique, so it must include every constant compiled in, such as a width.
    `file`: the file that defines the function, if its code object does not record that."""

    def decorate(function: Callable[..., Any]) -> Any:
        compiled = numba.njit(nogil=True, pipeline_class=_Closed, **options)(function)
        return kept(name, file or function.__code__.co_filename, compiled)

    return decorate


def part(*, loop: bool = False, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return a decorator that compiles a function as a part of its callers, with these options of `numba.njit`. The
    function cannot be called from Python. Without `loop` it is optimised only inside its callers, which saves compile
    time. A loop is also optimised on its own, since LLVM keeps less of it in registers inside a large function."""

    def decorate(function: Callable[..., Any]) -> Any:
        return numba.njit(nogil=True, pipeline_class=_LoopPart if loop else _Part, **options)(function)

    return decorate


class ClosedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A library that owns all functions linked into it."""

    def _optimize_final_module(self) -> None:
        for function in self._final_module.functions:
            if not function.is_declaration and function.linkage is Linkage.linkonce_odr:
                function.linkage = Linkage.internal
        super()._optimize_final_module()


class UnoptimisedLibrary(JITCodeLibrary):  # type: ignore[misc]
    """A library optimised only after it becomes part of another one."""

    def _optimize_final_module(self) -> None:
        """Do nothing."""


@register_pass(mutates_CFG=True, analysis_only=False)
class ClosedLowering(NativeLowering):  # type: ignore[misc]
    """Numba's lowering into a closed library."""

    _name = "closed_lowering"

    def run_pass(self, state: Any) -> Any:
        state.library = ClosedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        state.library.enable_object_caching()
        return super().run_pass(state)


@register_pass(mutates_CFG=True, analysis_only=False)
class LoopLowering(NativeLowering):  # type: ignore[misc]
    """Numba's lowering, without machine code."""

    _name = "loop_lowering"

    def run_pass(self, state: Any) -> Any:
        state.flags.no_compile = state.flags.no_cpython_wrapper = state.flags.no_cfunc_wrapper = True
        super().run_pass(state)
        # A dispatcher needs an entry point even without machine code. This bound builtin equals no other entry point,
        # and raises a TypeError when called with a tuple of arguments.
        entry: Any = bytearray().append
        state.targetctx.insert_user_function(entry, state["cr"].fndesc, [state.library])
        state["cr"] = state["cr"]._replace(cfunc=entry)
        return True


@register_pass(mutates_CFG=True, analysis_only=False)
class PartLowering(LoopLowering):
    """Loop lowering into an unoptimised library."""

    _name = "part_lowering"

    def run_pass(self, state: Any) -> Any:
        state.library = UnoptimisedLibrary(state.targetctx.codegen(), state.func_id.func_qualname)
        return super().run_pass(state)


class _Compiler(CompilerBase):  # type: ignore[misc]
    """Numba's passes with a different lowering."""

    lowering: type[NativeLowering]

    def define_pipelines(self) -> list[Any]:
        passes = DefaultPassBuilder.define_nopython_pipeline(self.state)
        passes.add_pass_after(self.lowering, NativeLowering)
        passes.passes = [entry for entry in passes.passes if entry[0] is not NativeLowering]
        passes.finalize()
        return [passes]


class _Closed(_Compiler):
    lowering = ClosedLowering


class _Part(_Compiler):
    lowering = PartLowering


class _LoopPart(_Compiler):
    lowering = LoopLowering
