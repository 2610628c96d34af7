"""The part of the numerics fingerprint that names the device."""

from __future__ import annotations

import platform

import torch


def device_kind(device: str) -> str:
    """Return a name for what torch computes on, which differs where bits may."""
    if torch.device(device).type == "cuda":
        return f"cuda-{torch.version.cuda}-{torch.cuda.get_device_name(device).replace(' ', '-')}"
    return f"{device}-{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}"
