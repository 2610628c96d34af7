"""The exit statuses of commands and services: what a script can tell apart. Those from 64 on are sysexits.h's."""

from __future__ import annotations

import signal
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
    SHORT_OF_MEMORY = 71
    """A service got no memory, again and again, and ended to be started anew."""
    TRY_AGAIN = 75
    """The server has no room, or the time given did not suffice: the same may succeed later."""
    INTERRUPTED = 130
    """Interrupted by SIGINT (Ctrl-C)."""
    BROKEN_PIPE = 141
    """Whoever read the output has gone, as `head` does."""
    TERMINATED = 143
    """Told to end by SIGTERM, in the middle of an export."""


def how_it_ended(status: int) -> str:
    """Return how a process ended, for a person, from the status that its parent gets: below zero it is a signal's."""
    if status >= 0:
        short = ": memory was short" if status == ExitStatus.SHORT_OF_MEMORY else ""
        return f"exit status {status}{short}"
    if -status not in set(signal.Signals):
        return f"killed by signal {-status}"
    name = signal.Signals(-status).name
    return f"killed by {name}{SIGNALS.get(name, '')}"


SIGNALS = {
    "SIGKILL": ", as the system does where memory is short",
    "SIGSEGV": ", a fault in compiled code",
    "SIGABRT": ", a fault in compiled code, or no memory for it",
    "SIGBUS": ", a file that was cut while it was mapped, or no memory",
    "SIGILL": ", code for another processor",
}
"""What ends a process by a signal that it is not sent by hand."""
