"""Everything besides the model that affects bits: our arithmetic and the device, as parts of the numerics fingerprint,
and the machine, as part of a cache key (`kept_exactness.py`)."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch

from specdec.engine.processor import cpu_kind

ARITHMETIC = "a1"
"""Version of our own arithmetic in attention, products and layers. Increase it with every change after which a logit
may have other bits on any device. No test can notice that: the bits differ between processors anyway."""

VARYING = ("processor", "cpu MHz", "bogomips", "BogoMIPS", "physical id", "core id", "apicid", "initial apicid")
"""Fields of /proc/cpuinfo that do not affect arithmetic, but differ between cores or starts."""

SETTINGS = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "TORCH_")
"""Prefixes of environment variables that change how torch and the libraries under it compute."""


def device_kind(device: str) -> str:
    """Return a name for torch's compute device that differs if bits may differ."""
    if torch.device(device).type == "cuda":
        return f"cuda-{torch.version.cuda}-{torch.cuda.get_device_name(device).replace(' ', '-')}"
    return f"{device}-{cpu_kind()}-{torch.backends.cpu.get_cpu_capability()}"  # torch's name does not tell AMX


def machine() -> tuple[object, ...] | None:
    """Return everything that decides which kernels torch runs on this CPU: the processor with its caches, the cores
    available to this process, settings, and the libraries torch was built with. None if unknown."""
    try:
        first = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
        caches = [
            file.read_text().strip() for file in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("*/size"))
        ]
        cores = sorted(os.sched_getaffinity(0))
    except (OSError, AttributeError):  # not Linux, or its files are hidden
        return None
    processor = [line for line in first if line.partition(":")[0].strip() not in VARYING]
    settings = sorted((name, value) for name, value in os.environ.items() if name.startswith(SETTINGS))
    return (
        platform.machine(),
        tuple(processor),
        tuple(caches),
        tuple(cores),
        os.cpu_count(),
        tuple(settings),
        torch.__config__.show(),
        torch.__config__.parallel_info(),
        torch.get_float32_matmul_precision(),
    )
