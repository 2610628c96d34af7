"""How many cores this process is given: by its affinity and by the limits of its cgroups, of either version."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def cores_given(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return the cores that this process may use, at least 1. A quota of one and a half cores counts as two: a thread
    for the half is worth more than none."""
    given = float(len(os.sched_getaffinity(0)))
    for quota in _quotas(mount, membership):
        given = min(given, quota)
    return max(1, math.ceil(given))


def _quotas(mount: Path, membership: Path) -> Iterator[float]:
    """Yield the limits, in cores, of the process's cgroups and of all above them."""
    for controllers, group in _groups(membership):
        if not controllers:  # version 2
            yield from (quota for folder in _upwards(mount, group) if (quota := _version_2(folder)))
        elif "cpu" in controllers.split(","):
            for place in (mount / controllers, mount / "cpu"):
                yield from (quota for folder in _upwards(place, group) if (quota := _version_1(folder)))


def _groups(membership: Path) -> list[tuple[str, str]]:
    """Return the controllers and the path of each cgroup of the process; those of version 2 have no controllers."""
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
        return [(parts[1], parts[2]) for parts in lines if len(parts) == 3]
    return []


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and of those above it; in a container its own may be mounted as the top one."""
    path = PurePosixPath(group.lstrip("/"))
    for each in (path, *path.parents):
        if ".." not in each.parts:
            yield mount / each


def _version_2(folder: Path) -> float | None:
    """Return the limit in `cpu.max`; None if there is none."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota, period = (folder / "cpu.max").read_text().split()
        return float(quota) / float(period) if quota != "max" else None
    return None


def _version_1(folder: Path) -> float | None:
    """Return the limit in `cpu.cfs_quota_us`; None if there is none, which is -1."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        quota = float((folder / "cpu.cfs_quota_us").read_text())
        return quota / float((folder / "cpu.cfs_period_us").read_text()) if quota > 0 else None
    return None
