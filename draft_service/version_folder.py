"""The folder of versions: each complete sub-directory is a version of the draft's model.

A version is complete once it has a marker: the file COMPLETE, written last, or the description of an export, which
`specdec export` moves into place together with the other files. Directories whose names begin with a dot, or contain
UNFINISHED, are ignored, so a writer may also fill a directory under such a name and then rename it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import ClassVar, NamedTuple

import structlog

from specdec.engine.model_directory import COMPLETE, DESCRIPTION
from specdec.engine.model_file import ModelDirectoryError
from specdec.wire.file_version import Version as FileVersion
from specdec.wire.file_version import version_of

log = structlog.get_logger()

UNFINISHED = ".partial-"
"""Part of the name of an export that is being written (`model_folder.py`)."""

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""A version's name, which is also a label of metrics."""

MAX_VERSIONS = 64
"""Maximum versions in the folder; beyond it, the oldest are not tried."""


class VersionsError(ModelDirectoryError):
    """Raised if the folder of versions cannot be read."""


class FoundVersion(NamedTuple):
    """A complete version."""

    name: str
    path: Path
    marked: FileVersion
    """File version of the marker (`version_of`). When it changes, the model version is tried again."""


class VersionsFolder:
    """The folder's complete versions, oldest marker first, for a `Watched` to follow."""

    what: ClassVar[str] = "versions"
    unusable: ClassVar[type[Exception]] = VersionsError

    def __init__(self, path: Path) -> None:
        self.path = path
        self.left_out = ""

    @property
    def all(self) -> tuple[Path]:
        return (self.path,)

    def version(self) -> FileVersion:
        """Return the file versions of the folder, its directories and their markers, to detect changes. OSError if the
        folder cannot be read."""
        found = version_of(self.path)
        for directory in self._directories():
            for file in (directory, directory / COMPLETE, directory / DESCRIPTION):
                try:
                    found += version_of(file)
                except OSError:  # removed meanwhile, or the marker does not exist
                    continue
        return found

    def read(self) -> tuple[FoundVersion, ...]:
        """Return the complete versions; VersionsError if the folder cannot be read."""
        try:
            directories = self._directories()
        except OSError as error:
            raise VersionsError(f"--versions {self.path}: cannot be read: {error.strerror or error}") from error
        found: list[FoundVersion] = []
        problems: list[str] = []
        for directory in directories:
            if not NAME.fullmatch(directory.name):
                problems.append(f"{directory.name!r} is not a name of 1 to 64 letters, digits, . _ and -")
            elif (marked := _marked(directory)) is None:
                problems.append(f"{directory.name} has neither {COMPLETE} nor {DESCRIPTION}")
            else:
                found.append(FoundVersion(directory.name, directory, marked))
        found.sort(key=lambda version: (version.marked[0][1], version.name))
        if len(found) > MAX_VERSIONS:
            problems.append(f"{len(found)} versions, must be at most {MAX_VERSIONS}: the oldest are not tried")
        if (left_out := "; ".join(problems)) != self.left_out and left_out:
            log.warning("versions_left_out", folder=str(self.path), why=left_out)
        self.left_out = left_out
        return tuple(found)

    def _directories(self) -> list[Path]:
        """Return the directories that may be versions, sorted by name."""
        with os.scandir(self.path) as entries:
            names = [
                entry.name
                for entry in entries
                if not entry.name.startswith(".") and UNFINISHED not in entry.name and entry.is_dir()
            ]
        return [self.path / name for name in sorted(names)]


def _marked(directory: Path) -> FileVersion | None:
    """Return the file version of a directory's marker; None if the directory has none."""
    for name in (COMPLETE, DESCRIPTION):
        try:
            return version_of(directory / name)
        except OSError:
            continue
    return None
