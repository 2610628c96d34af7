"""The machine: the cores and memory available to this process, and devices."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import NamedTuple

from specdec.engine.cpu_count import cores_given
from specdec.engine.memory import free_on_host
from specdec.engine.preflight.device import cuda_devices, torch_build
from specdec.engine.processor import computes_bfloat16

MEMINFO = Path("/proc/meminfo")


class Machine(NamedTuple):
    """The cores, memory and devices of this machine. Memory is in bytes, None if unknown."""

    system: str
    cores_given: int
    """Cores available to this process under its affinity and cgroups."""
    cores: int
    memory_free: int | None
    """Memory still available to this process within the limits of its cgroups."""
    memory: int | None
    bfloat16: bool
    """Whether the processor has bfloat16 arithmetic."""
    torch: str
    """Target of the torch build: "CPUs", "CUDA 13.0", "ROCm 7.1"; "" without torch."""
    cuda: int | str
    """Number of CUDA devices seen by the driver, or the reason for none."""

    @property
    def advice(self) -> str:
        """The remedy if torch cannot use a GPU; "" if nothing is wrong."""
        if isinstance(self.cuda, int) and self.cuda and self.torch == "CPUs":
            return "torch is a CPU build and cannot use it: install a CUDA build of torch"
        return ""

    @classmethod
    def here(cls) -> Machine:
        """Inspect this machine."""
        return cls(
            system=f"{platform.system()} {platform.machine()}",
            cores_given=cores_given(),
            cores=os.cpu_count() or 1,
            memory_free=_memory_free(),
            memory=_memory(),
            bfloat16=computes_bfloat16(),
            torch=_built_for(),
            cuda=cuda_devices(),
        )


def _memory_free() -> int | None:
    try:
        return free_on_host()
    except (OSError, ValueError, KeyError):
        return None


def _memory() -> int | None:
    try:
        first = MEMINFO.read_text().split("\n", 1)[0]  # MemTotal:  8165432 kB
        return 1024 * int(first.split()[1])
    except (OSError, ValueError, IndexError):
        return None


def _built_for() -> str:
    built = torch_build()
    if not built:
        return ""
    if built.get("cuda"):
        return f"CUDA {built['cuda']}"
    return f"ROCm {built['hip']}" if built.get("hip") else "CPUs"
