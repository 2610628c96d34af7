"""Identifies this machine's processors without torch: their arithmetic, and the properties by which libraries choose
kernels."""

from __future__ import annotations

import ctypes
import hashlib
import platform
from pathlib import Path
from typing import Any

CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Instruction sets that multiply bfloat16 numbers, by Linux's names."""

DECIDING = ("model name", "flags", "Features", "CPU part", "CPU implementer")
"""Fields of /proc/cpuinfo by which libraries choose their kernels."""


def computes_bfloat16(cpuinfo: Path = CPUINFO, machine: str | None = None) -> bool:
    """Return whether the processor has bfloat16 arithmetic; without it, float32 is much faster. True if unknown: only
    x86-64 on Linux is examined."""
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return True
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BFLOAT16_FLAGS.isdisjoint(flags)


def cpu_kind(cpuinfo: Path = CPUINFO) -> str:
    """Return a name for this machine's processor that differs if libraries may choose other kernels."""
    try:
        first = cpuinfo.read_text().partition("\n\n")[0].splitlines()
    except OSError:  # not Linux, or hidden
        return platform.machine()
    deciding = "\n".join(line for line in first if line.partition(":")[0].strip() in DECIDING)
    return f"{platform.machine()}-{hashlib.sha256(deciding.encode()).hexdigest()[:12]}"


def gpu_kind(index: int, driver: Any = None) -> str:
    """Return the name of a CUDA device, from the driver; "unknown" if the driver is missing or fails."""
    name, device = ctypes.create_string_buffer(256), ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1") if driver is None else driver
    except OSError:
        return "unknown"
    found = (
        not driver.cuInit(0)
        and not driver.cuDeviceGet(ctypes.byref(device), index)
        and not driver.cuDeviceGetName(name, len(name), device)
    )
    return name.value.decode(errors="replace").replace(" ", "-") if found else "unknown"
