"""Versions of files: detect a replaced or changed file without reading it."""

from __future__ import annotations

from pathlib import Path

Version = tuple[tuple[int, int, int, int], ...]
"""Inode, mtime, ctime and size of each file; any difference makes another version. The ctime covers permissions too: an
unreadable file may become readable."""


def version_of(*files: Path) -> Version:
    """Return the current version of some files; OSError if one cannot be found."""
    stats = [each.stat() for each in files]
    return tuple((each.st_ino, each.st_mtime_ns, each.st_ctime_ns, each.st_size) for each in stats)
