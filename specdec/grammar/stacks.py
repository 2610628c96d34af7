"""Stack sizes of the threads that work with grammars, and threads that have them.

llguidance walks rules and definitions by recursion. A walk that needs more stack than its thread has ends the process
with SIGSEGV, and nothing can catch that. So a grammar is tried on a stack that is a fraction of what any thread of a
service has: what passes the trial cannot end a service this way. Stacks are virtual memory until they are used.
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
"""Stack of the thread that tries grammars: enough for a chain of 630 rules of Lark, or of 220 definitions of JSON
objects, each within the next (3.3 and 9.2 kB a level, as measured with llguidance 1.9)."""

SERVICE_STACK_BYTES = 16 << 20
"""Stack of every thread of a service that compiles, follows or frees a grammar. The margin of eight covers what differs
between the processes: frames of Python and thread-local storage."""

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

_lock = threading.Lock()


@contextmanager
def stack_of(size: int) -> Iterator[None]:
    """Give threads that start meanwhile a stack of this size. Python's setting is global: a thread that another thread
    happens to start now gets the same stack."""
    with _lock:
        before = threading.stack_size(size)
        try:
            yield
        finally:
            threading.stack_size(before)


class ServiceThreads(ThreadPoolExecutor):
    """A pool of threads that may work with grammars."""

    def submit(
        self, fn: Callable[Parameters, Result], /, *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Future[Result]:
        with stack_of(SERVICE_STACK_BYTES):  # a thread that is missing starts in here
            return super().submit(fn, *args, **kwargs)

    async def run(self, function: Callable[..., Result], *args: object) -> Result:
        """Run a function in one of the threads, in the caller's context, like `asyncio.to_thread`."""
        call = partial(contextvars.copy_context().run, function, *args)
        return await asyncio.get_running_loop().run_in_executor(self, call)
