"""The cache folder: what one start has worked out and the next one uses again.

It is `$SPECDEC_CACHE_DIR`, else `$XDG_CACHE_HOME/specdec`, else `~/.cache/specdec`; an empty `SPECDEC_CACHE_DIR` turns
it off. What it holds is executed, so a folder that others can write to is never used. An entry is written whole or not
at all, and found only under a key that names everything it depends on. A folder that cannot be used costs only time.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import platform
import shutil
import stat
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import structlog

log = structlog.get_logger()

MOST_BYTES = 256 << 20
"""Bytes that entries may take together; those that were not used for longest go first. One takes about 200 kB."""

COMPILERS = {"TORCHINDUCTOR_CACHE_DIR": "inductor", "TRITON_CACHE_DIR": "triton", "VLLM_CACHE_ROOT": "vllm"}
"""Environment variables that say where torch's compiler, Triton and vLLM keep compiled code, and where they do here."""

PACKAGES = ("numba", "llvmlite", "numpy", "torch", "transformers")
"""Packages whose versions decide what is compiled and computed."""

_DIGEST = hashlib.sha256().digest_size


def place() -> Path | None:
    """Return where the cache folder is or would be; None if it is turned off."""
    named = os.environ.get("SPECDEC_CACHE_DIR")
    if named is not None:
        return Path(named) if named else None
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path(os.path.expanduser("~")) / ".cache") / "specdec"


def why_unusable(folder: Path) -> str:
    """Make the folder if it is missing; return why it is not used, nothing if it is ours alone to write."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        return str(error)
    if not stat.S_ISDIR(found.st_mode):
        return "it is a link or no folder"
    if found.st_uid != os.geteuid():
        return "it belongs to another user"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "other users can write to it (chmod 700 mends that)"
    return ""


def usable() -> Path | None:
    """Return the cache folder; None if it is turned off or cannot be used."""
    folder = place()
    return folder if folder is not None and _usable(folder) else None


@functools.cache
def _usable(folder: Path) -> bool:
    """Return whether the folder can be used, and say once why it cannot."""
    why = why_unusable(folder)
    if why:
        log.warning("cache_not_used", folder=str(folder), why=why, cost="each start compiles and checks anew")
    return not why


def keep_compiled_code() -> None:
    """Have the compilers below an engine keep their code in folders that are ours alone to write: they execute what
    they find there, and torch's own choice is a temporary folder that anybody may have made first. The environment may
    name others, if nobody else can write to them. Without a cache folder the code lives as long as this process."""
    for variable, name in COMPILERS.items():
        named = os.environ.get(variable)
        if named:
            why = why_unusable(Path(named))
            if not why:
                continue
            log.warning("cache_not_used", folder=named, why=why, cost=f"{variable} is not followed")
        folder = (usable() or _temporary()) / name
        if why := why_unusable(folder):
            log.warning("cache_not_used", folder=str(folder), why=why, cost="each start compiles and checks anew")
            folder = _temporary() / name
            folder.mkdir(mode=0o700, exist_ok=True)
        os.environ[variable] = str(folder)


@functools.cache
def _temporary() -> Path:
    """Return a new folder of this process alone, which goes when it ends."""
    folder = tempfile.mkdtemp(prefix="specdec-compiled-")  # of mode 0700
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def sources() -> str:
    """Return a digest of all our sources that decide how an engine computes, so that no change of them is missed: a
    compiled loop holds code of several files."""
    package = Path(__file__).parent.parent
    digest = hashlib.sha256()
    for folder in ("engine", "decoding"):
        for path in sorted((package / folder).rglob("*.py")):
            content = path.read_bytes()
            digest.update(f"{path.relative_to(package)} {len(content)}\n".encode() + content)
    return digest.hexdigest()


@functools.cache
def versions() -> tuple[str, ...]:
    """Return our sources, the interpreter and the versions of what they build on."""
    return (
        sources(),
        sys.implementation.cache_tag or "",
        platform.python_version(),
        *(f"{each} {version(each)}" for each in PACKAGES),
    )


def read(kind: str, *key: object) -> bytes | None:
    """Return the entry with this key; None if there is none, or it is not as it was written."""
    folder = usable()
    if folder is None:
        return None
    path = folder / _name(kind, key)
    try:
        content = path.read_bytes()
        with contextlib.suppress(OSError):  # a folder of an image cannot be written
            os.utime(path)  # so that the latest used ones stay
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("cache_not_read", file=str(path), why=str(error))
        return None
    data = content[_DIGEST:]
    return data if hashlib.sha256(data).digest() == content[:_DIGEST] else None


def write(data: bytes, kind: str, *key: object) -> None:
    """Keep an entry under this key. Processes that write the same one at once each write it whole; the last one
    stays."""
    folder = usable()
    if folder is None:
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="new-", delete=False) as file:  # of mode 0600
            file.write(hashlib.sha256(data).digest() + data)
        os.replace(file.name, folder / _name(kind, key))
        _bound(folder)
    except OSError as error:
        log.warning("cache_not_written", folder=str(folder), why=str(error), cost="the next start does this again")


def _name(kind: str, key: tuple[object, ...]) -> str:
    return f"{kind}-{hashlib.sha256(repr((key, versions())).encode()).hexdigest()[:40]}"


def _bound(folder: Path) -> None:
    """Remove the entries that were not used for longest, once all take more than MOST_BYTES."""
    entries = []
    for each in os.scandir(folder):
        if not each.is_file(follow_symlinks=False):  # exports of drafts lie here as well
            continue
        try:
            found = each.stat(follow_symlinks=False)
        except FileNotFoundError:  # another process was quicker
            continue
        entries.append((found.st_mtime, found.st_size, each.path))
    size = sum(of_one for _, of_one, _ in entries)
    for _, of_one, path in sorted(entries):
        if size <= MOST_BYTES:
            break
        Path(path).unlink(missing_ok=True)
        size -= of_one
