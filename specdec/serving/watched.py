"""Files whose contents are read again when they change.

Whoever changes files replaces them, one after the other or all at once: what does not fit together, or cannot be read,
is left alone until it can.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import structlog

from specdec.client.file_version import Version
from specdec.client.tls_files import TlsFiles

log = structlog.get_logger()

Contents = TypeVar("Contents", covariant=True)


class Files(Protocol[Contents]):
    """Some files that are read together."""

    @property
    def what(self) -> str:
        """What they are, for the log."""

    @property
    def unusable(self) -> type[Exception]:
        """The error of `read` for files that cannot be used."""

    @property
    def all(self) -> Iterable[Path | None]: ...

    def version(self) -> Version:
        """Return what the files are now; OSError if one cannot be found."""

    def read(self) -> Contents: ...

    @property
    def left_out(self) -> str:
        """The parts of the files as last read that could not be used, and why, though the rest could; empty if all
        could."""


class Watched(Generic[Contents]):
    """Files as last read, and read again when they have changed. May be asked by any thread."""

    def __init__(self, files: Files[Contents]) -> None:
        """Read the files; their error if they cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._refused = ""  # why they could not be used when they were last looked at
        _all.add(self)
        try:
            self._version = files.version()
        except OSError:
            self._version = ()
        self.contents = files.read()

    @property
    def refused(self) -> bool:
        """True while the files, or a part of them, cannot be used as they are."""
        return bool(self._refused or self._files.left_out)

    @property
    def what(self) -> str:
        return self._files.what

    def changed(self) -> bool:
        """Look at the files, and return whether they have other contents since the last call. Files that cannot be used
        are read again at each look, until they can; each reason is logged once."""
        with self._lock:
            try:
                version = self._files.version()
                if version == self._version:
                    self._refused = ""
                    return False
                contents = self._files.read()
                if self._files.version() != version:  # in the middle of being replaced
                    return False
            except (OSError, self._files.unusable) as error:  # of a missing file, or of what could not be read now
                if str(error) != self._refused:
                    log.warning("files_refused", what=self._files.what, why=str(error))
                self._refused = str(error)
                return False
            self._version, self.contents, self._refused = version, contents, ""
            paths = [str(each) for each in self._files.all if each is not None]
            log.info("files_changed", what=self._files.what, files=paths)
            return True


_all: WeakSet[Watched[Any]] = WeakSet()


def refused() -> Mapping[str, int]:
    """Return, for all files that this process watches, how many sets of each kind cannot be used as they are. TLS files
    are among the kinds in any case: every service may have some."""
    found: Counter[str] = Counter({TlsFiles.what: 0})
    for each in list(_all):
        found[each.what] += each.refused
    return found
