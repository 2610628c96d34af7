"""The number of cores available to this process, by its affinity and its cgroups' limits (both cgroup versions), the
thread count derived from it, and the number of threads that the cgroups permit.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Cgroup(NamedTuple):
    """A cgroup that limits this process: its own or an ancestor."""

    version: int  # 1 or 2: their files have different names
    folder: Path


def cgroups(controller: str, mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Iterator[Cgroup]:
    """Yield the cgroups in which a controller (`cpu`, `memory`, `pids`) may limit this process, each before its
    ancestors."""
    for controllers, group in _groups(membership):
        if not controllers:
            yield from (Cgroup(2, folder) for folder in _upwards(mount, group))
        elif controller in controllers.split(","):
            for place in dict.fromkeys((mount / controllers, mount / controller)):
                yield from (Cgroup(1, folder) for folder in _upwards(place, group))


def _groups(membership: Path) -> list[tuple[str, str]]:
    """Return the controllers and the path of each cgroup of the process; controllers are empty in version 2."""
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
        return [(parts[1], parts[2]) for parts in lines if len(parts) == 3]
    return []


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and its ancestors. In a container, the cgroup's own folder may be mounted as the
    root."""
    path = PurePosixPath(group.lstrip("/"))
    for folder in (path, *path.parents):
        if ".." not in folder.parts:
            yield mount / folder


MAX_THREADS = 1024
"""Limit on the threads of a forward pass. If the system cannot start all requested threads, OpenMP ends the process."""


def threads_for(device: str) -> int:
    """Return the default number of CPU threads of a forward pass: one per core, but only one for a GPU."""
    return min(MAX_THREADS, cores_given()) if device == "cpu" else 1


def cores_given(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int:
    """Return the cores available to this process, at least 1. A quota of one and a half cores counts as two, so that
    the half is used."""
    given = float(len(os.sched_getaffinity(0)))
    for group in cgroups("cpu", mount, membership):
        quota = _quota(group)
        if quota is not None:
            given = min(given, quota)
    return max(1, math.ceil(given))


def _quota(group: Cgroup) -> float | None:
    """Return a cgroup's limit in cores; None if there is none."""
    with contextlib.suppress(OSError, ValueError, ZeroDivisionError):
        if group.version == 2:
            quota, period = (group.folder / "cpu.max").read_text().split()
            return float(quota) / float(period) if quota != "max" else None
        limit = float((group.folder / "cpu.cfs_quota_us").read_text())  # -1: no limit
        return limit / float((group.folder / "cpu.cfs_period_us").read_text()) if limit > 0 else None
    return None


def threads_left(mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> int | None:
    """Return how many more threads this process may start within its cgroups' limits; None if there is no limit."""
    left = (_threads_left_in(group.folder) for group in cgroups("pids", mount, membership))
    return min((count for count in left if count is not None), default=None)


def _threads_left_in(folder: Path) -> int | None:
    """Return how many more threads a cgroup permits; None if it sets no limit, or its files cannot be read."""
    with contextlib.suppress(OSError, ValueError):  # "max" means no limit
        limit, used = (int((folder / name).read_text()) for name in ("pids.max", "pids.current"))
        return max(0, limit - used)
    return None
