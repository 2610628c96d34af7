"""A stderr that never raises and never blocks.

A full disk, a closed pipe or a stalled reader must not break a service: a line that cannot be written now is dropped
and counted.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import stat
import sys
import threading
from typing import TextIO

MAX_LINE_BYTES = 1 << 16
"""Maximum bytes of a line; longer ones are cut. Log values are bounded before, so a longer line is a bug here, which
must not fill a disk."""


class LossyStream(io.TextIOBase):
    """A stream that writes text to a file descriptor unbuffered; `lost` counts the writes that failed."""

    def __init__(self, fd: int) -> None:
        self.lost = 0
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()
        self._torn = False  # the last write stopped in the middle of a line

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        data = text.encode("utf-8", "backslashreplace")
        if len(data) > MAX_LINE_BYTES:
            data = data[:MAX_LINE_BYTES] + b"...\n"
        with self._lock:
            if not self._written(b"\n" + data if self._torn else data):
                self.lost += 1
        return len(text)

    def _written(self, data: bytes) -> bool:
        """Write all data, in pieces of PIPE_BUF bytes, which a pipe reported writable takes without blocking; return
        False on failure."""
        view = memoryview(data)
        while view:
            try:
                if not self._poll.poll(0):
                    return False
                view = view[os.write(self._fd, view[: select.PIPE_BUF]) :]
            except OSError:
                return False
            self._torn = bool(view)
        return True


def guard_stderr() -> LossyStream:
    """Replace `sys.stderr` by a `LossyStream`, for all writers in this process."""
    if not isinstance(sys.stderr, LossyStream):
        sys.stderr = LossyStream(_descriptor(sys.stderr))
    return sys.stderr


def _descriptor(stream: TextIO | None) -> int:
    """Return a non-blocking descriptor for a stream's target, leaving the target blocking for other writers.

    A regular file never blocks and is not reopened: if stdout is the same file, both must share one write position.
    """
    fd = 2
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):  # closed, or not a file
            stream.flush()
            fd = stream.fileno()
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # a socket, or another user's terminal
        pass
    try:
        return os.dup(fd)
    except OSError:  # closed: the next file opened must not get number 2
        devnull_fd = os.open(os.devnull, os.O_WRONLY)
        return devnull_fd if devnull_fd == 2 else os.dup2(devnull_fd, 2)
