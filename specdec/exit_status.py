"""The exit statuses of commands and services: what a script can tell apart. Those from 64 on are sysexits.h's."""

from __future__ import annotations

from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command or a service ended."""

    FAILED = 1
    """It cannot run here: a package is missing, a port is taken, a model cannot be served."""
    USAGE = 2
    """A wrong option, value or file of prompts; nothing was asked."""
    REFUSED = 65
    """The server refused the request: the request is wrong, or names what the server does not have."""
    UNREACHABLE = 69
    """No server answers at the address, or none that it needs."""
    INTERNAL = 70
    """A mistake of ours, in this process or at the server."""
    TRY_AGAIN = 75
    """The server has no room, or the time given did not suffice: the same may succeed later."""
    INTERRUPTED = 130
    """Interrupted by SIGINT (Ctrl-C)."""
    BROKEN_PIPE = 141
    """Whoever read the output has gone, as `head` does."""
    TERMINATED = 143
    """Told to end by SIGTERM, in the middle of an export."""
