"""Arithmetic supported by this machine's processor, found without torch."""

from __future__ import annotations

import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")

BFLOAT16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Instruction sets that multiply bfloat16 numbers, by Linux's names."""


def computes_bfloat16(cpuinfo: Path = CPUINFO, machine: str | None = None) -> bool:
    """Return whether the processor has bfloat16 arithmetic: without it float32 is much faster. True if unknown: only
    x86-64 on Linux is examined."""
    if (machine or platform.machine()) not in ("x86_64", "AMD64"):
        return True
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return True
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return not BFLOAT16_FLAGS.isdisjoint(flags)
