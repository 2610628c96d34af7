"""CPU time of code under test."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def taking_less_than(seconds: float, what: object = "it") -> Iterator[None]:
    """Assert that this thread takes less CPU time in the context. There is no garbage collection meanwhile: one of all
    that the tests have loaded takes up to half a second."""
    gc.disable()
    try:
        begin = time.thread_time()
        yield
        taken = time.thread_time() - begin
    finally:
        gc.enable()
    assert taken < seconds, f"{what} took {taken:.3f} s of CPU time, must take less than {seconds} s"
