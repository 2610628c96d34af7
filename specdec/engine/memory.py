"""How much key/value memory there is room for."""

from __future__ import annotations

import contextlib
from pathlib import Path

SHARE = 0.5
"""Of the free memory so much is given to keys and values where nobody says otherwise."""

MOST_SLOTS = 1 << 20


def slots_for(slot_bytes: int, device: str) -> int:
    """The number of slots of `slot_bytes` that a device has room for."""
    return min(MOST_SLOTS, int(SHARE * free_bytes(device)) // slot_bytes)


def free_bytes(device: str) -> int:
    """Memory that can be taken: of a CUDA device; of the machine, within what a container may have."""
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(lines["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError):  # no such group, or no limit ("max")
        limit = int((group / "memory.max").read_text())
        free = min(free, limit - int((group / "memory.current").read_text()))
    return max(0, free)
