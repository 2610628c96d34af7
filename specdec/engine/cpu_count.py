"""The number of cores available to this process, by its affinity and its cgroups' limits (both versions), and the
thread count derived from it."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from specdec.engine.cgroups import MEMBERSHIP, MOUNT, Cgroup, cgroups

MAX_THREADS = 1024
"""Limit on the threads of a forward pass. If the system cannot start all requested threads, OpenMP ends the process."""


def threads_for(device: str) -> int:
    """Return the default CPU threads of a forward pass: one per core; one beside a GPU."""
    return min(MAX_THREADS, cores_given()) if device == "cpu" else 1


def cores_given(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return the cores available to this process, at least 1. A quota of one and a half cores counts as two: a thread
    for the half is better than none."""
    given = float(len(os.sched_getaffinity(0)))
    for group in cgroups("cpu", mount, membership):
        quota = _quota(group)
        if quota is not None:
            given = min(given, quota)
    return max(1, math.ceil(given))


def _quota(group: Cgroup) -> float | None:
    """Return a cgroup's limit in cores; None if it sets none."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if group.version == 2:
            quota, period = (group.folder / "cpu.max").read_text().split()
            return float(quota) / float(period) if quota != "max" else None
        limit = float((group.folder / "cpu.cfs_quota_us").read_text())  # -1: no limit
        return limit / float((group.folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    return None
