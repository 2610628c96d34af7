"""Versions of files: tells whether a file was replaced or changed, without reading it."""

from __future__ import annotations

from pathlib import Path

Version = tuple[tuple[int, int, int, int], ...]
"""Inode, times of change (of the contents; of them, the name or the permissions) and size of each of some files:
another version where any of them differs. A file that could not be read may become readable."""


def version_of(*files: Path) -> Version:
    """Return what some files are now; OSError if one cannot be found."""
    stats = [each.stat() for each in files]
    return tuple((each.st_ino, each.st_mtime_ns, each.st_ctime_ns, each.st_size) for each in stats)
