"""This process's heap: memory allocated by malloc."""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path


class _Mallinfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    ]


def allocated_bytes() -> int:
    """Return the bytes currently allocated by malloc, in its main arena and in separate mappings. Without glibc 2.33,
    return the process's resident bytes."""
    try:
        mallinfo = ctypes.CDLL(None).mallinfo2
    except (AttributeError, OSError):
        return resident_bytes()
    mallinfo.restype = _Mallinfo
    found = mallinfo()
    return int(found.uordblks + found.hblkhd)


def resident_bytes() -> int:
    """Return the resident bytes of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE
