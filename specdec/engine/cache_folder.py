"""The cache folder: results of one start, reused by the next.

Its path is `$SPECDEC_CACHE_DIR`, else `$XDG_CACHE_HOME/specdec`, else `~/.cache/specdec`; an empty `SPECDEC_CACHE_DIR`
turns it off. The contents are executed, so a folder writable by others is never used. Entries are written atomically,
and their keys include everything they depend on. An unusable folder costs only time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import re
import shutil
import stat
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import structlog

from specdec.engine.derived_models import user_cache

log = structlog.get_logger()

MAX_BYTES = 256 << 20
"""Limit on the bytes of all entries; the least recently used are removed first. An entry takes about 200 kB."""

COMPILERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Environment variables for the code caches of torch's compiler, Triton and vLLM, and our folder name for each."""

PACKAGES = ("numba", "llvmlite", "numpy", "torch", "transformers")
"""Packages whose versions affect compiled code and results."""

_DIGEST = hashlib.sha256().digest_size


def place() -> Path | None:
    """Return the path of the cache folder, whether or not it exists; None if it is turned off."""
    named = os.environ.get("SPECDEC_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    return user_cache()


def why_unusable(folder: Path) -> str:
    """Create the folder if it is missing. Return why it is unusable; empty if only this user can write to it."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link or not a folder"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it (chmod 700 fixes that)"
    return ""


def usable() -> Path | None:
    """Return the cache folder; None if it is turned off or unusable."""
    folder = place()
    return folder if folder is not None and _usable(folder) else None


@functools.cache
def _usable(folder: Path) -> bool:
    """Return whether the folder is usable; log once if not."""
    why = why_unusable(folder)
    if why:
        log.warning("cache_not_used", folder=str(folder), why=why, cost="every start compiles and checks again")
    return not why


def keep_compiled_code() -> None:
    """Point the engines' compilers to code caches that only this user can write to. The compilers execute the code in
    their caches, and torch's default is a temporary folder that anyone may have created first. A folder set in the
    environment is used if only this user can write to it. Without a cache folder, compiled code is deleted when this
    process ends."""
    for variable, name in COMPILERS.items():
        named = os.environ.get(variable)
        if named:
            why = why_unusable(Path(named))
            if not why:
                continue
            log.warning("cache_not_used", folder=named, why=why, cost=f"{variable} is ignored")
        folder = (usable() or temporary()) / name
        if why := why_unusable(folder):
            if os.access(folder.parent, os.W_OK):  # a read-only cache is reported once something is not written to it
                log.warning("cache_not_used", folder=str(folder), why=why, cost="every start compiles and checks again")
            folder = temporary() / name
            folder.mkdir(mode=0o700, exist_ok=True)
        os.environ[variable] = str(folder)


@functools.cache
def temporary() -> Path:
    """Return a new private folder, removed when this process ends."""
    folder = tempfile.mkdtemp(prefix="specdec-")  # mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def sources() -> str:
    """Return a digest of all our sources that affect an engine's results: a compiled loop contains code from several
    files."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("engine", "decoding"):
        for path in sorted((package / folder).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def versions() -> tuple[str, ...]:
    """Return the digest of our sources, and the versions of the interpreter and packages."""
    return (
        sources(),
        sys.implementation.cache_tag or "",
        platform.python_version(),
        *(f"{package} {version(package)}" for package in PACKAGES),
    )


def read(kind: str, *key: object) -> bytes | None:
    """Return the entry with this key; None if it is missing or damaged."""
    folder = usable()
    if folder is None:
        return None
    path = folder / _name(kind, key)
    try:
        content = path.read_bytes()
        with contextlib.suppress(OSError):  # a folder in an image may be read-only
            os.utime(path)  # marks it as recently used
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cache_not_read", file=str(path), why=str(error))
        return None
    data = content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == content[:_DIGEST] else None


def write(data: bytes, kind: str, *key: object) -> None:
    """Store an entry under this key. Each concurrent writer of an entry writes it completely; the last one wins."""
    folder = usable()
    if folder is None:
        return
    try:
        descriptor, new = tempfile.mkstemp(dir=folder, prefix="new-")  # mode 0600
        try:
            with open(descriptor, "wb") as file:
                file.write(hashlib.sha256(data).digest() + data)
            os.replace(new, folder / _name(kind, key))
        except OSError:
            os.unlink(new)
            raise
        _bound(folder)
    except OSError as error:
        log.warning("cache_not_written", folder=str(folder), why=str(error), cost="the next start repeats this work")


_ENTRY = re.compile(r"[a-z]+-[0-9a-f]{40}|new-\w{8}")
"""Names of entries, also of one that is being written."""


def _name(kind: str, key: tuple[object, ...]) -> str:
    return f"{kind}-{hashlib.sha256(repr((key, versions())).encode()).hexdigest()[:40]}"


def entries(folder: Path) -> list[tuple[float, int, str]]:
    """Return (time of the last use, size, path) of the entries in a folder. It may also contain other files and
    subfolders, such as exports of drafts."""
    found = []
    for entry in os.scandir(folder):
        if not _ENTRY.fullmatch(entry.name) or not entry.is_file(follow_symlinks=False):
            continue
        with contextlib.suppress(FileNotFoundError):  # removed by another process
            seen = entry.stat(follow_symlinks=False)
            found.append((seen.st_mtime, seen.st_size, entry.path))
    return found


def _bound(folder: Path) -> None:
    """Remove the least recently used entries while the total exceeds MAX_BYTES."""
    found = entries(folder)
    size = sum(of_one for _, of_one, _ in found)
    for _, of_one, path in sorted(found):
        if size <= MAX_BYTES:
            break
        Path(path).unlink(missing_ok=True)
        size -= of_one
