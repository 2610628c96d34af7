"""Ports and the cache folder of the services."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from specdec import ports
from specdec.serving.process.listening import ListenError, bound

LISTENING = {"orchestrator": ports.ORCHESTRATOR, "verifier": ports.VERIFIER, "draft": ports.DRAFT}

OPTIONS = {"orchestrator": "--port", "verifier": "--verifier-port", "draft": "--draft-port"}
"""Options of `specdec up` that set these ports."""


class Cache(NamedTuple):
    """The cache folder."""

    folder: Path | None
    """None if it is turned off, or no service is installed."""
    unusable: str
    """Why it is not used; "" if it is."""
    entries: int = 0
    size: int = 0
    """Bytes of all entries."""


def taken_ports(host: str = "127.0.0.1") -> dict[str, str]:
    """Return, by role, the reason why a service cannot listen at its default port; "" if it can."""
    found = {}
    for role, port in LISTENING.items():
        try:
            bound(host, port, option=OPTIONS[role]).close()
            found[role] = ""
        except ListenError as error:
            why = str(error).removeprefix(f"{OPTIONS[role]} {port}: ")
            found[role] = f"{why}, by specdec up {OPTIONS[role]} PORT"
    return found


def cache() -> Cache:
    """Inspect the cache folder, creating it if it is missing. ModuleNotFoundError if no service is installed."""
    from specdec.engine import cache_folder

    folder = cache_folder.place()
    if folder is None:
        return Cache(None, "it is turned off (SPECDEC_CACHE_DIR is empty)")
    if why := cache_folder.why_unusable(folder):
        return Cache(folder, why)
    try:
        sizes = [size for _, size, _ in cache_folder.entries(folder)]
    except OSError as error:
        return Cache(folder, str(error))
    why = "" if os.access(folder, os.W_OK | os.X_OK) else "it is not writable"
    return Cache(folder, why, len(sizes), sum(sizes))
