"""Stack sizes of threads that process grammars, and thread pools with such stacks.

llguidance walks rules and definitions recursively. A stack overflow there ends the process with SIGSEGV, which cannot
be caught. So a grammar is tried on a stack smaller than any service thread's: a grammar that passes the trial cannot
crash a service in this way. Stacks are virtual memory until they are used.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

TRIAL_STACK_BYTES = 2 << 20
"""Stack of the trial thread: enough for a chain of 630 Lark rules, or of 220 nested definitions of JSON objects (3.3
and 9.2 kB per level, as measured with llguidance 1.9)."""

SERVICE_STACK_BYTES = 16 << 20
"""Stack of every service thread that compiles, follows or frees a grammar. This is eight times the trial's stack, to
cover differences between the processes: Python frames and thread-local storage."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_lock = threading.Lock()


@contextmanager
def stack_of(size: int) -> Iterator[None]:
    """Give threads started inside this context a stack of this size. Python's setting is global, so threads that other
    threads start meanwhile get the same stack size."""
    with _lock:
        before = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(before)


class ServiceThreads(ThreadPoolExecutor):
    """A thread pool for work with grammars."""

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        with stack_of(SERVICE_STACK_BYTES):  # submit starts missing threads
            return super().submit(fn, *args, **kwargs)

    async def run(self, function: Callable[..., Result], *args: object) -> Result:
        """Run a function in one of the threads, in the caller's context, like `asyncio.to_thread`."""
        call = partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self, call)
