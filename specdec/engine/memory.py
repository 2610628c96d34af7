"""How much key/value memory there is room for, and what becomes of memory that a step has used."""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from typing import Any

from specdec.engine.engine import UnsupportedModelError

SHARE = 0.5
TEXTS = 64
"""Where nobody says otherwise, there is memory for so many texts of a model's full length, but no more than this share
of what is free: more would take long to fetch, and be of use to prefixes only."""

LEAST_SLOTS = 512

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
MOST_KEPT = 1 << 30


def slots_for(slot_bytes: int, context: int, device: str, sharers: int = 1) -> int:
    """The number of slots of `slot_bytes` for a model of `context` tokens on a device that so many processes share
    evenly; UnsupportedModelError if there is room for next to none."""
    slots = min(max(LEAST_SLOTS, TEXTS * context), int(SHARE * free_bytes(device)) // sharers // slot_bytes)
    if slots < LEAST_SLOTS:
        raise UnsupportedModelError(
            f"free memory has room for {slots} tokens of keys and values, at least {LEAST_SLOTS} are needed: "
            "make room, or say --kv-tokens"
        )
    return slots


def free_bytes(device: str) -> int:
    """Memory that can be taken: of a CUDA device; of the machine, within what a container may have."""
    if device.startswith("cuda"):
        with contextlib.suppress(ImportError, AssertionError):  # without torch, or with one that has no CUDA
            import torch

            torch.cuda.empty_cache()  # what torch keeps of freed memory, of weights that were joined for one
            return int(torch.cuda.mem_get_info(device)[0])
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedModelError(f"device {device}: there is no CUDA driver ({error})") from error
        return free_by_driver(driver, int(device.partition(":")[2] or 0))
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):  # no such group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        statistics = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        cached_files = int(statistics["inactive_file"])  # the weights just read, for one; given back when needed
        free = min(free, limit - int((group / "memory.current").read_text()) + cached_files)
    return max(0, free)


def free_by_driver(driver: Any, index: int) -> int:
    """Free bytes of a CUDA device by the driver's own interface: an ONNX service has no torch to ask."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device, context = ctypes.c_int(), ctypes.c_void_p()
    for name, *arguments in (
        ("cuInit", 0),
        ("cuDeviceGet", ctypes.byref(device), index),
        ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device),
        ("cuCtxPushCurrent_v2", context),
        ("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total)),
        ("cuCtxPopCurrent_v2", ctypes.byref(context)),
    ):
        status = getattr(driver, name)(*arguments)
        if status:
            raise UnsupportedModelError(f"device cuda:{index}: the CUDA driver's {name} failed with status {status}")
    return free.value


def keep_freed_memory() -> None:
    """Have this process's allocator keep what is freed, up to MOST_KEPT bytes, for the next who asks.

    glibc gives large pieces back to the system at once, and the kernel hands out cleared ones again: for a wide
    model's intermediate results that was a third of a step of 64 rows. Without glibc nothing is changed.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MOST_KEPT)
        mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


def share_memory_among_threads() -> None:
    """Have all threads of this process, none of which may have begun, take memory from the same arena.

    glibc gives each thread one of its own, made of pieces of 64 MiB, and what does not fit is fetched from the system
    and given back each time, whatever it was told to keep: products over 512 rows of 60M parameters that took 49 ms in
    the main thread took 65 to 69 in another, and 50 to 52 so (by hand). Without glibc nothing is changed.
    """
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
