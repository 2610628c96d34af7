"""A search of this process for the holders of a sequence of tokens, and of files for texts."""

from __future__ import annotations

import gc
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

WIDTHS = ("<u2", "<u4", "<u8")
"""Integers that tokens may be packed as."""

KINDS = (Message, array, bytes, bytearray, np.ndarray, list, tuple, deque)
"""Types of objects that may hold tokens."""


def holders(*texts: Callable[[], Sequence[int]]) -> list[list[Any]]:
    """Return for each text the live objects that hold its tokens in a row: lists, tuples and arrays of numbers, packed
    bytes, and messages. The `texts` are called here, so that no caller holds the tokens. Takes seconds."""
    wanted = [np.asarray(tokens(), dtype=np.int64) for tokens in texts]
    packed = [packed_forms(each) for each in wanted]
    seen = {*map(id, wanted), *(id(form) for forms in packed for form in forms)}
    found: list[list[Any]] = [[] for _ in texts]
    gc.collect()
    for container in gc.get_objects():
        for candidate in (container, *gc.get_referents(container)):
            if issubclass(type(candidate), KINDS) and id(candidate) not in seen:
                seen.add(id(candidate))
                for holding, numbers, forms in zip(found, wanted, packed, strict=True):
                    with suppress(ReferenceError, IndexError, RuntimeError):  # dead, or changed by another thread
                        if _holds(candidate, numbers, forms):
                            holding.append(candidate)
    return found


def files_with(folder: Path, *forms: bytes) -> list[Path]:
    """Return the files below a folder that contain one of these."""
    found = []
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            if any(form in content for form in forms):
                found.append(file)
    return found


def packed_forms(numbers: NDArray[np.int64]) -> list[bytes]:
    """Return the bytes that tokens may be packed as."""
    return [numbers.astype(width).tobytes() for width in WIDTHS] + [varints(numbers)]


def varints(numbers: NDArray[np.int64]) -> bytes:
    """Return numbers as messages pack them."""
    packed = bytearray()
    for number in numbers.tolist():
        while number > 0x7F:
            packed.append(number & 0x7F | 0x80)
            number >>= 7
        packed.append(number)
    return bytes(packed)


def _holds(candidate: Any, wanted: NDArray[np.int64], packed: Sequence[bytes]) -> bool:
    if isinstance(candidate, Message):
        candidate = candidate.SerializeToString()
    if isinstance(candidate, array):
        candidate = candidate.tobytes()
    if isinstance(candidate, bytes | bytearray):
        return any(form in candidate for form in packed)
    if isinstance(candidate, np.ndarray):
        return candidate.ndim == 1 and candidate.dtype.kind in "iu" and _runs(candidate.astype(np.int64), wanted)
    if isinstance(candidate, list | tuple | deque) and len(candidate) >= len(wanted) and type(candidate[0]) is int:
        return all(type(item) is int for item in candidate) and _runs(np.asarray(candidate, dtype=object), wanted)
    return False


def _runs(numbers: NDArray[Any], wanted: NDArray[np.int64]) -> bool:
    """Return whether the wanted numbers occur in a row somewhere in `numbers`."""
    if len(numbers) < len(wanted):
        return False
    starts = np.flatnonzero(numbers[: len(numbers) - len(wanted) + 1] == wanted[0])
    return any(np.array_equal(numbers[start : start + len(wanted)], wanted) for start in starts)
