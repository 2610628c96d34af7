"""What torch computes on, as far as it decides bits."""

from __future__ import annotations

import platform

import torch


def device_kind(device: str) -> str:
    """For the fingerprint."""
    if torch.device(device).type == "cuda":
        return f"cuda-{torch.version.cuda}-{torch.cuda.get_device_name(device).replace(' ', '-')}"
    return f"{device}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
