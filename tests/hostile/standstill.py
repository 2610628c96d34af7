"""Pauses of the whole machine, as noticed by a separate process.

A virtual machine may stand still for seconds. A process cannot tell that from a pause of its own, but two processes
can, since only the machine stops both.
"""

from __future__ import annotations

import asyncio
import select
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

LONG_SECONDS = 0.1
"""Shorter pauses are not reported."""

Span = tuple[float, float]
"""Begin and end, by the monotonic clock, which all processes share."""


def waited_for_a_core() -> float:
    """Return the seconds for which this thread was runnable but not running; 0 if the kernel does not report them."""
    try:
        return int(Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()[1]) / 1e9
    except FileNotFoundError:
        return 0.0


def io_stall() -> float:
    """Return the seconds for which any task of the machine waited for I/O, for example for pages that the kernel had
    reclaimed; 0 if the kernel does not report them."""
    try:
        return int(Path("/proc/pressure/io").read_text().split("total=")[1].split()[0]) / 1e6
    except FileNotFoundError:
        return 0.0


@dataclass
class Standstills:
    """The pauses of a process that does nothing but watch for them."""

    pid: int
    spans: list[Span] = field(default_factory=list)  # filled on exit

    def within(self, begin: float, end: float) -> float:
        """Return for how many seconds between these times the process stood still."""
        return sum(max(0.0, min(end, late) - max(begin, early)) for early, late in self.spans)


@asynccontextmanager
async def standstills() -> AsyncIterator[Standstills]:
    """Watch until the context exits."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-S", __file__, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    await process.stdout.readline()  # it watches from now on
    found = Standstills(process.pid)
    try:
        yield found
    finally:
        output, _ = await process.communicate(b"")  # Python 3.11 leaves stdin open without an input
        found.spans += [(float(begin), float(end)) for begin, end in map(str.split, output.decode().splitlines())]


def watch() -> None:
    """Print pauses of this process in which it did not wait for a core, until standard input ends."""
    noticed, waited = time.monotonic(), waited_for_a_core()
    print("watching", flush=True)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        now, waited_now = time.monotonic(), waited_for_a_core()
        if now - noticed - (waited_now - waited) > LONG_SECONDS:
            print(noticed, now)
        noticed, waited = now, waited_now


if __name__ == "__main__":
    watch()
