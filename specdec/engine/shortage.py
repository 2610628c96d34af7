"""Memory shortages: recognising them, since each library has its own exception or message, and reporting them while a
model is loaded."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from specdec.engine.unsupported import UnsupportedModelError

MESSAGES = (
    "can't allocate memory",  # torch
    "not enough memory",
    "out of memory",  # CUDA, and our own matrix products
    "out_of_memory",  # oneDNN
    "could not create a primitive",
    "could not create a memory object",
    "bad_alloc",  # C++
    "bad allocation",
    "failed to allocate memory",  # ONNX Runtime
    "available memory of",  # ONNX Runtime's arena
    "can't start new thread",
)
"""Parts of libraries' messages about failed allocations, in lower case. They come in ordinary RuntimeErrors."""


@contextmanager
def within_gpu_memory(loaded: object, remedy: str = "use fewer --kv-tokens") -> Iterator[None]:
    """Raise UnsupportedModelError, naming `loaded` and the remedy, if torch has too little GPU memory."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:  # raised for GPU memory only
        reason = str(error).partition(". ")[0]  # the rest is statistics
        raise UnsupportedModelError(f"{loaded}: {reason}; {remedy}") from error


def is_shortage(error: BaseException) -> bool:
    """Return whether an exception, or one of its causes, is a memory shortage."""
    return any(map(_is_shortage, _whole(error, set())))


def _is_shortage(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    # An error about a request's text may quote such a message, but is not a RuntimeError. ONNX Runtime's errors share
    # no base class.
    of_library = isinstance(error, RuntimeError) or type(error).__module__.startswith("onnxruntime")
    return of_library and any(part in str(error).lower() for part in MESSAGES)


def _whole(error: BaseException, seen: set[int]) -> Iterator[BaseException]:
    """Yield an exception, the members of a group, and all causes and contexts."""
    if id(error) in seen:
        return
    seen.add(id(error))
    yield error
    inner = error.exceptions if isinstance(error, BaseExceptionGroup) else ()
    for other in (*inner, error.__cause__, None if error.__suppress_context__ else error.__context__):
        if other is not None:
            yield from _whole(other, seen)
