"""A device in benchmarks: its bandwidth, its free memory, and the timing of its work."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from specdec.engine.memory import free_bytes

COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}
"""Bytes of the tensor copied to measure bandwidth: many times the size of caches."""

REPEATS = 9


class Device:
    def __init__(self, name: str) -> None:
        self.name = name
        self.kind = torch.device(name).type

    def synchronise(self) -> None:
        if self.kind == "cuda":
            torch.cuda.synchronize(self.name)

    def free(self) -> None:
        """Free memory without references."""
        gc.collect()
        if self.kind == "cuda":
            torch.cuda.empty_cache()

    def free_bytes(self) -> int:
        return free_bytes(self.name)

    def bandwidth(self) -> float:
        """Return the bandwidth of copying a large tensor, in bytes read plus bytes written per second: the median of
        several copies after a first one that is discarded."""
        source = torch.ones(COPIED[self.kind] // 4, device=self.name)
        target = torch.empty_like(source)
        seconds = [self.timed(lambda: target.copy_(source))[1] for _ in range(REPEATS + 1)][1:]
        return 2 * source.numel() * source.element_size() / statistics.median(seconds)

    def timed(self, run: Callable[[], object]) -> tuple[float, float]:
        """Return the seconds until `run` returned, and until the device had finished it."""
        self.synchronise()
        begin = time.perf_counter()
        run()
        returned = time.perf_counter()
        self.synchronise()
        return returned - begin, time.perf_counter() - begin

    def facts(self) -> dict[str, Any]:
        """Return properties of an accelerator; none for a CPU."""
        if self.kind != "cuda":
            return {}
        about = torch.cuda.get_device_properties(self.name)
        return {"device": about.name, "device_gib": round(about.total_memory / 2**30, 1), "cuda": torch.version.cuda}
