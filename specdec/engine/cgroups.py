"""The cgroups of this process: folders with its limits, for both versions."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

MOUNT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


class Cgroup(NamedTuple):
    """A cgroup that limits this process: its own, or an ancestor."""

    version: int  # 1 or 2: their files have different names
    folder: Path


def cgroups(controller: str, mount: Path = MOUNT, membership: Path = MEMBERSHIP) -> Iterator[Cgroup]:
    """Yield the cgroups in which a controller (`cpu`, `memory`) may limit this process, each followed by its
    ancestors."""
    for controllers, group in _groups(membership):
        if not controllers:
            yield from (Cgroup(2, folder) for folder in _upwards(mount, group))
        elif controller in controllers.split(","):
            for place in dict.fromkeys((mount / controllers, mount / controller)):
                yield from (Cgroup(1, folder) for folder in _upwards(place, group))


def _groups(membership: Path) -> list[tuple[str, str]]:
    """Return the controllers and the path of each cgroup of the process; in version 2 controllers are empty."""
    with contextlib.suppress(OSError):
        lines = [line.split(":", 2) for line in membership.read_text().splitlines()]
        return [(parts[1], parts[2]) for parts in lines if len(parts) == 3]
    return []


def _upwards(mount: Path, group: str) -> Iterator[Path]:
    """Yield the folders of a cgroup and its ancestors; in a container its own may be mounted as the root."""
    path = PurePosixPath(group.lstrip("/"))
    for folder in (path, *path.parents):
        if ".." not in folder.parts:
            yield mount / folder
