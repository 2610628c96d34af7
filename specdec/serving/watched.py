"""Files that are reloaded when they change.

Operators replace files one by one or all together. Files that are inconsistent or unreadable are ignored until they
become usable.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar
from weakref import WeakSet

import structlog

from specdec.wire.file_version import Version
from specdec.wire.tls_files import TlsFiles

log = structlog.get_logger()

Contents = TypeVar("Contents", covariant=True)


class Files(Protocol[Contents]):
    """Files that are read together."""

    @property
    def what(self) -> str:
        """Kind of files, for the log."""

    @property
    def unusable(self) -> type[Exception]:
        """The error raised by `read` for unusable files."""

    @property
    def all(self) -> Iterable[Path | None]: ...

    def version(self) -> Version:
        """Return the current version of the files; OSError if one is missing."""

    def read(self) -> Contents: ...

    @property
    def left_out(self) -> str:
        """Skipped parts of the files as last read, with reasons; "" if everything was usable."""


class Watched(Generic[Contents]):
    """Files as last read, reloaded on change. Thread-safe."""

    def __init__(self, files: Files[Contents]) -> None:
        """Read the files; raise their `unusable` error if that fails."""
        self._files = files
        self._lock = threading.Lock()
        self._refused = ""  # why the last check rejected the files; "" if it did not
        _all.add(self)
        try:
            self._version = files.version()
        except OSError:
            self._version = ()
        self.contents = files.read()

    @property
    def refused(self) -> bool:
        """True while the files, or a part of them, are unusable."""
        return bool(self._refused or self._files.left_out)

    @property
    def what(self) -> str:
        return self._files.what

    def changed(self) -> bool:
        """Check the files; return whether their contents have changed since the last call. Unusable files are read
        again at each check until they become usable; each reason is logged once."""
        with self._lock:
            try:
                version = self._files.version()
                if version == self._version:
                    if self._refused:  # the last usable ones are back
                        self._log_usable()
                    return False
                contents = self._files.read()
                if self._files.version() != version:  # they are being replaced right now
                    return False
            except (OSError, self._files.unusable) as error:  # a file is missing or unusable
                if str(error) != self._refused:
                    log.warning("files_refused", what=self._files.what, why=str(error))
                self._refused = str(error)
                return False
            self._version, self.contents = version, contents
            self._log_usable()
            return True

    def _log_usable(self) -> None:
        """Log that changed files are usable; after a refusal, at the refusal's level."""
        write = log.warning if self._refused else log.info
        self._refused = ""
        write("files_changed", what=self._files.what, files=[str(file) for file in self._files.all if file is not None])


_all: WeakSet[Watched[Any]] = WeakSet()


def refused() -> Mapping[str, int]:
    """Return the number of watched file sets that are unusable, by kind. TLS files are always listed, since any service
    may use them."""
    found: Counter[str] = Counter({TlsFiles.what: 0})
    for watched in list(_all):
        found[watched.what] += watched.refused
    return found
