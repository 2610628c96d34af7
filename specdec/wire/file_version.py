"""Versions of files, which reveal a replaced or changed file without reading it."""

from __future__ import annotations

from pathlib import Path

Version = tuple[tuple[int, int, int, int], ...]
"""Inode, mtime, ctime and size of each file; any difference means another version. The ctime also changes with
permissions: an unreadable file may become readable."""


def version_of(*files: Path) -> Version:
    """Return the current version of these files; OSError if one cannot be found."""
    stats = [file.stat() for file in files]
    return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size) for stat in stats)
