"""Exit statuses of commands and services, for scripts. Numbers 64 to 78 follow sysexits.h."""

from __future__ import annotations

import signal
from enum import IntEnum


class ExitStatus(IntEnum):
    """How a command or a service ended."""

    FAILED = 1
    """The command or service cannot run here: a package is missing, a port is taken, a model cannot be served,
    a disk is full."""
    USAGE = 2
    """An invalid option, value or file of prompts; no request was sent."""
    REFUSED = 65
    """The server refused the request: it is invalid, or names something that the server lacks."""
    UNREACHABLE = 69
    """No server answers at the address, or the server lacks another server that it needs."""
    INTERNAL = 70
    """A bug of specdec, in this process or at the server."""
    SHORT_OF_MEMORY = 71
    """A service repeatedly got no memory, and ended so that it can be restarted."""
    TRY_AGAIN = 75
    """The server has no room, or the deadline has passed: a retry may succeed later."""
    INTERRUPTED = 130
    """Interrupted by SIGINT (Ctrl-C)."""
    BROKEN_PIPE = 141
    """The reader of the output has gone, as with `head`."""
    TERMINATED = 143
    """Terminated by SIGTERM in the middle of an export, an import or a training."""


def how_it_ended(status: int) -> str:
    """Describe to the user how a process ended. `status` is what its parent sees: -N for signal N."""
    if status >= 0:
        short = ": memory was short" if status == ExitStatus.SHORT_OF_MEMORY else ""
        return f"exit status {status}{short}"
    if -status not in set(signal.Signals):
        return f"killed by signal {-status}"
    name = signal.Signals(-status).name
    return f"killed by {name}{SIGNALS.get(name, '')}"


SIGNALS = {
    "SIGKILL": ", as the system does when memory is short",
    "SIGSEGV": ", a fault in compiled code",
    "SIGABRT": ", a fault in compiled code, or it ran out of memory",
    "SIGBUS": ", a mapped file was truncated, or memory ran out",
    "SIGILL": ", code for another processor",
}
"""Usual causes of signals that no person sent."""
