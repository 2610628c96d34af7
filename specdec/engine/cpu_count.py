"""How many cores this process is given: by its affinity and by the limits of its cgroups, of either version."""

from __future__ import annotations

import contextlib
import math
import os
from pathlib import Path

from specdec.engine.cgroups import MEMBERSHIP, MOUNT, Cgroup, cgroups


def cores_given(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return the cores that this process may use, at least 1. A quota of one and a half cores counts as two: a thread
    for the half is worth more than none."""
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
