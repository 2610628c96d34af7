"""A compact encoding of packed batches, sent to every rank of a parallel engine in every step.

Most of a batch is slots, in long runs of consecutive numbers, and masks, packed eight entries to a byte.
"""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
from numpy.typing import NDArray

WORTH_IT = 64
"""Minimum size of an int64 array to be encoded as runs, if its runs average at least four numbers."""


def dumps(thing: Any) -> bytes:
    """Pickle anything, with a compact form for the arrays in it. `pickle.loads` reads the result."""
    buffer = io.BytesIO()
    _Pickler(buffer, protocol=5).dump(thing)
    return buffer.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, thing: Any) -> Any:
        if type(thing) is np.ndarray and thing.dtype == np.bool_:
            return _mask, (np.packbits(thing).tobytes(), thing.shape)
        if type(thing) is np.ndarray and thing.dtype == np.int64 and thing.size >= WORTH_IT:
            flat = thing.ravel()
            begins = np.concatenate([[0], np.flatnonzero(np.diff(flat) != 1) + 1])
            if 4 * len(begins) <= len(flat):
                return _runs, (flat[begins].tobytes(), begins.tobytes(), thing.shape)
        return NotImplemented


def _mask(packed: bytes, shape: tuple[int, ...]) -> NDArray[np.bool_]:
    size = int(np.prod(shape))
    return np.unpackbits(np.frombuffer(packed, np.uint8), count=size).view(np.bool_).reshape(shape)


def _runs(firsts: bytes, begins: bytes, shape: tuple[int, ...]) -> NDArray[np.int64]:
    size = int(np.prod(shape))
    starts = np.frombuffer(begins, np.int64)
    lengths = np.diff(starts, append=size)
    return (np.repeat(np.frombuffer(firsts, np.int64) - starts, lengths) + np.arange(size)).reshape(shape)
