"""Memory: how many KV cache slots fit, and malloc settings that retain the memory freed by a step."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import sys
from pathlib import Path
from typing import Any

from specdec.decoding.block_hashes import HASHED_TOKENS
from specdec.engine.cpu_count import MEMBERSHIP, MOUNT, Cgroup, cgroups
from specdec.engine.unsupported import UnsupportedModelError
from specdec.engine.working_memory import MAX_STEP_CANDIDATES

SHARE = 0.5
TEXTS = 64
"""Default capacity of the KV cache in texts, limited to SHARE of the free memory. More would take long to allocate, and
would serve only prefix caching."""

TEXT_TOKENS = 1024
"""Maximum length of these texts on a CPU. On a GPU, whose memory has no other use, it is the model's context."""

MIN_SLOTS = 512

LIMIT_FILES = {1: ("memory.limit_in_bytes", "memory.usage_in_bytes"), 2: ("memory.max", "memory.current")}
"""cgroup version -> the files with a group's limit and usage, in bytes."""

MADV_POPULATE_WRITE = 23  # mman.h, since Linux 5.14
TOUCHED_AT_ONCE = 4 << 20
"""Bytes per madvise call. During a call (some milliseconds), no other thread can get memory from the system."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
MAX_KEPT_BYTES = 1 << 30


def slots_for(
    slot_bytes: int,
    context: int,
    device: str,
    promised: int = 0,
    working: int = 0,
    row_bytes: int = 0,
) -> int:
    """Return the number of slots of `slot_bytes` each, for a model of `context` tokens; UnsupportedModelError if fewer
    than MIN_SLOTS fit.

    `promised` bytes are reserved by other parts of this process, but not yet allocated by the system. `working` and
    `row_bytes`: as in `slots_within`.
    """
    free = max(0, free_bytes(device) - promised)
    slots = slots_within(free, slot_bytes, slots_wanted(context, device), working, row_bytes)
    if slots < MIN_SLOTS:
        raise UnsupportedModelError(
            f"the free memory has room for a KV cache of {slots} tokens, must have room for {MIN_SLOTS}: free some "
            "memory, or set --kv-tokens"
        )
    return slots


def slots_wanted(context: int, device: str) -> int:
    """Return the number of slots for TEXTS texts, but at least MIN_SLOTS, and enough for one text as long as the
    model's context. The verifier sets aside the slots for a step's candidates, the block of the padding slot, and what
    exceeds a whole block."""
    length = min(context, TEXT_TOKENS) if device == "cpu" else context
    return max(MIN_SLOTS, context + MAX_STEP_CANDIDATES + 2 * HASHED_TOKENS, TEXTS * length)


def slots_within(free: int, slot_bytes: int, wanted: int, working: int, row_bytes: int) -> int:
    """Return how many of the `wanted` slots fit into `free` bytes besides `working` bytes of working memory, using at
    most SHARE of the rest. `row_bytes` of logits are set aside for each block, since each could belong to another
    session."""
    rest = max(0, free - working)
    with_rows = slot_bytes + -(-row_bytes // HASHED_TOKENS)
    return min(wanted, int(SHARE * rest) // slot_bytes, rest // with_rows)


def free_bytes(device: str) -> int:
    """Return the free bytes of a CUDA device, or of the machine within its container's limit. For CUDA it asks torch if
    that is loaded, else the driver: ONNX services, and services before loading a model, must not import torch."""
    if device.startswith("cuda"):
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()  # returns torch's cached memory, such as the weights before they were joined
            return int(torch.cuda.mem_get_info(device)[0])
        try:
            driver = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise UnsupportedModelError(f"device {device}: there is no CUDA driver ({error})") from error
        return free_by_driver(driver, int(device.partition(":")[2] or 0))
    return free_on_host()


def free_on_host(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return the bytes still available to this process: the machine's, within the limits of the process's cgroups."""
    limits = (_free_in(group) for group in cgroups("memory", mount, membership))
    return min([free_on_machine(), *(free for free in limits if free is not None)])


def free_on_machine() -> int:
    """Return the machine's free bytes, including memory reclaimable without swapping."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def _free_in(group: Cgroup) -> int | None:
    """Return a cgroup's free bytes; None if it sets no limit, or its files cannot be read."""
    limit, used = LIMIT_FILES[group.version]
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" means no limit
        given = int((group.folder / limit).read_text())
        statistics = dict(line.split() for line in (group.folder / "memory.stat").read_text().splitlines())
        # Cached files, such as weights read once (inactive) or again (active), are reclaimed when needed. Version 1
        # counts subgroups only in totals.
        whole = "total_" if "total_inactive_file" in statistics else ""
        cached_files = int(statistics[f"{whole}inactive_file"]) + int(statistics[f"{whole}active_file"])
        return max(0, given - int((group.folder / used).read_text()) + cached_files)
    return None


def free_by_driver(driver: Any, index: int) -> int:
    """Return the free bytes of a CUDA device, from the driver."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    device, context = ctypes.c_int(), ctypes.c_void_p()

    def call(name: str, *arguments: object) -> None:
        status = getattr(driver, name)(*arguments)
        if status:
            raise UnsupportedModelError(f"device cuda:{index}: the CUDA driver's {name} failed with status {status}")

    call("cuInit", 0)
    call("cuDeviceGet", ctypes.byref(device), index)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    try:
        call("cuCtxPushCurrent_v2", context)
        try:
            call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(context))
    finally:
        call("cuDevicePrimaryCtxRelease_v2", device)  # a context takes hundreds of megabytes of the device
    return free.value


def touch(address: int, size: int) -> None:
    """Have the system allocate the pages of `size` bytes of memory now instead of at their first writes. Their contents
    do not change. Does nothing before Linux 5.14."""
    libc = ctypes.CDLL(None)
    first, end = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE, address + size
    with contextlib.suppress(AttributeError):
        for start in range(first, end - mmap.PAGESIZE + 1, TOUCHED_AT_ONCE):
            length = min(TOUCHED_AT_ONCE, (end - start) // mmap.PAGESIZE * mmap.PAGESIZE)
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), MADV_POPULATE_WRITE):
                return


def give_freed_memory_back() -> None:
    """Return free memory to the system: malloc's, and torch's on GPUs. Without glibc, only torch's is returned."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


def drop_file_pages(suffix: str, maps: Path = Path("/proc/self/smaps")) -> None:
    """Remove the pages of mapped files with this suffix from this process; later reads come from the page cache.
    Mappings with written pages are kept, because the file does not contain those pages."""
    libc = ctypes.CDLL(None)
    first = length = 0
    with contextlib.suppress(OSError, AttributeError):
        for line in maps.read_text().splitlines():
            words = line.split(maxsplit=5)
            if "-" in words[0] and not words[0].endswith(":"):  # a mapping; the next lines describe it
                start, end = (int(address, 16) for address in words[0].split("-"))
                wanted = len(words) == 6 and words[5].endswith(suffix)
                first, length = (start, end - start) if wanted else (0, 0)
            elif words[0] == "Anonymous:" and words[1] == "0" and length:
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(length), mmap.MADV_DONTNEED)


def keep_freed_memory() -> None:
    """Make malloc retain freed memory, up to MAX_KEPT_BYTES bytes, for the next allocation.

    By default glibc returns large pieces to the system immediately, and the kernel zeroes the pages that it hands out
    again. For a wide model's intermediate results, that took a third of a step of 64 rows. Without glibc nothing
    changes.
    """
    with contextlib.suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_THRESHOLD, MAX_KEPT_BYTES)
        mallopt(M_TRIM_THRESHOLD, MAX_KEPT_BYTES)


def set_memory_policy() -> None:
    """Make all threads of this process allocate from one malloc arena, and put torch's tensors into huge pages. Must be
    called before any thread starts and before torch allocates.

    By default glibc gives each thread its own arena, made of pieces of 64 MiB. Larger allocations come from the system
    and return to it each time, even if malloc is set to retain memory. Products of 512 rows with 60M parameters took 49
    ms in the main thread, 65 to 69 ms in another thread, and 50 to 52 ms with a single arena (measured by hand).
    Without glibc nothing changes.

    With huge pages, laying out weights takes two thirds as long, and steps of few rows with 230M parameters take 3 to
    8 % less time (measured by hand). If the system's setting for huge pages is always or never, torch's request has no
    effect.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # torch's variable
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)
