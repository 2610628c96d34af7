"""The forgotten tenants, and when each was forgotten: their texts up to that time are not kept, and versions that
learned from these texts are not served.

With a folder of versions, each tenant is recorded there in a small file of its own. Services that share the folder
therefore know the same tenants without a lock, and a restart loses none.
"""

from __future__ import annotations

import math
import os
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from specdec.engine.learned_from import DIGEST, LearnedFrom, tenant_digest
from specdec.engine.model_file import ModelDirectoryError
from specdec.serving.errors import NotRememberedError
from specdec.wire.file_version import Version as FileVersion
from specdec.wire.file_version import version_of

log = structlog.get_logger()

FOLDER = ".forgotten"
"""Sub-folder of the folder of versions, with one file per tenant. The file is named by the tenant's digest, and
contains the time of forgetting in Unix seconds."""

MAX_FORGOTTEN = 10_000
"""Maximum number of records. Beyond it, the oldest record is dropped if there is no folder. A full folder refuses new
records instead: a dropped tenant could no longer exclude future versions."""

CLOCKS_APART_SECONDS = 300.0
"""Maximum clock skew between trainers and draft services. Forgetting also covers texts that begin up to this much
later, and versions that learned from texts kept up to this much later."""


SETTLED_SECONDS = 2.0
"""Seconds that the folder must stay unchanged until its records count as read. Some file systems store modification
times in whole seconds, so a record written right after a look may not change the folder's time."""


class Forgotten:
    """The forgotten tenants of one draft service, and of the services that share its folder. Thread-safe."""

    def __init__(
        self, versions: Path | None = None, clock: Callable[[], float] = time.time, most: int = MAX_FORGOTTEN
    ) -> None:
        """`versions`: the folder of versions, where tenants are recorded; None: in memory only. `clock` returns Unix
        seconds. `most`: limit on tenants. ModelDirectoryError if the folder cannot be read."""
        self._most = most
        self._folder = None if versions is None else versions / FOLDER
        self._clock = clock
        self._lock = threading.Lock()
        self._since: OrderedDict[str, float] = OrderedDict()  # tenant's digest -> Unix seconds
        self._read: dict[str, FileVersion] = {}  # files as last read, by name
        self._seen: FileVersion = ()  # the folder as last seen
        self._seen_at = 0.0  # `time.monotonic` when that version of the folder was first seen
        self._settled: FileVersion | None = None  # the folder when all its records had been read
        self._doubtful: frozenset[str] = frozenset()  # digests whose files cannot be read or parsed at present
        self._unreadable = ""  # the reason, as last logged
        try:
            self._take_names()
        except OSError as error:  # a service that does not know the forgotten tenants must not start
            raise ModelDirectoryError(f"{self._folder}: cannot be read: {error.strerror or error}") from error

    def add(self, tenant: str) -> None:
        """Record that a tenant's texts so far are forgotten. NotRememberedError if the record cannot be written: only
        this process then knows the tenant, until it ends."""
        self.look()  # another service's clock may be ahead; the later time counts
        digest = tenant_digest(tenant)
        with self._lock:
            self._note(digest, self._clock())
            since = self._since[digest]
        if self._folder is None:
            return
        if digest not in self._read and (known := len(self._read)) >= self._most:
            raise NotRememberedError(f"{self._folder} has {known} tenants, must have at most {self._most}")
        try:
            _write(self._folder, digest, repr(since))
        except OSError as error:
            raise NotRememberedError(f"{self._folder}: {error.strerror or error}") from error

    def look(self) -> bool:
        """Read the records of other services in the folder; return whether anything was new. While a file cannot be
        read or parsed, all texts of its tenant count as forgotten, whatever their age."""
        try:
            is_new = self._take_names()
        except OSError as error:
            if (why := f"{self._folder}: {error.strerror or error}") != self._unreadable:
                log.error("forgotten_unreadable", why=why, cost="tenants forgotten elsewhere are not known here")
            self._unreadable = why
            return False
        self._unreadable = ""
        return is_new

    def _take_names(self) -> bool:
        """Read new and changed files; return whether they had anything new. OSError if the folder cannot be read."""
        if self._folder is None or not self._folder.exists():  # no tenant was forgotten
            return False
        folder, now = version_of(self._folder), time.monotonic()
        if folder == self._settled and not self._doubtful:  # files are replaced, which changes their folder
            return False
        if folder != self._seen:
            self._seen, self._seen_at = folder, now
        with os.scandir(self._folder) as entries:
            names = [entry.name for entry in entries if DIGEST.fullmatch(entry.name)]
        is_new, doubtful = False, set[str]()
        for name in names:
            try:
                version = version_of(self._folder / name)
                if self._read.get(name) == version:
                    continue
                since = _seconds((self._folder / name).read_bytes())
            except FileNotFoundError:  # removed by an operator
                continue
            except (OSError, ValueError):  # read again at the next `look`
                doubtful.add(name)
                continue
            with self._lock:
                is_new |= self._note(name, since)
            self._read[name] = version
        with self._lock:
            is_new |= not doubtful <= self._doubtful
            self._doubtful = frozenset(doubtful)
        if now - self._seen_at >= SETTLED_SECONDS:
            self._settled = folder
        return is_new

    def _note(self, digest: str, since: float) -> bool:
        """Remember a tenant with the later of the known and given times; return whether that changed anything."""
        if self._since.get(digest, -1.0) >= since:
            return False
        self._since[digest] = since
        self._since.move_to_end(digest)
        if self._folder is None and len(self._since) > self._most:
            self._since.popitem(last=False)
        return True

    def keeps_out(self, tenant: str, begun: float) -> bool:
        """Return True if a text of this tenant that began at `begun`, in Unix seconds, must not be kept."""
        digest = tenant_digest(tenant)
        with self._lock:
            since = math.inf if digest in self._doubtful else self._since.get(digest)
        return since is not None and begun <= since + CLOCKS_APART_SECONDS

    def concerns(self, learned: LearnedFrom | None) -> bool:
        """Return whether a model has learned from a forgotten text."""
        if learned is None or not learned.oldest:
            return False
        with self._lock:
            forgotten = [*self._since.items(), *((digest, math.inf) for digest in self._doubtful)]
        return any(learned.has(digest, since + CLOCKS_APART_SECONDS) for digest, since in forgotten)


def _write(folder: Path, name: str, content: str) -> None:
    """Write a file atomically, and flush the file and its directory entry to disk."""
    folder.mkdir(exist_ok=True)
    handle, partial = tempfile.mkstemp(prefix=".", dir=folder)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(partial, 0o644)  # readable for services of other users
        os.replace(partial, folder / name)
    except OSError:
        with suppress(OSError):
            os.unlink(partial)
        raise
    directory = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _seconds(content: bytes) -> float:
    """Return the Unix seconds in a file; ValueError if it has none."""
    found = float(content)
    if not 0 <= found < math.inf:
        raise ValueError(f"{found} is not a time")
    return found
