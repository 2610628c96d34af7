"""A stderr that never raises and never blocks.

A disk that is full, a reader that has left and one that has stopped reading are no reason for a service to fail: a
line that cannot be written now is dropped and counted.
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
"""Bytes of a line at most; a longer one is cut. What is logged is bounded before, so this is a mistake of ours that
must not fill a disk."""


class LossyStream(io.TextIOBase):
    """A stream that writes text to a file descriptor at once; `lost` counts the writes that could not be completed."""

    def __init__(self, fd: int) -> None:
        self.lost = 0
        self._fd = fd
        self._poll = select.poll()
        self._poll.register(fd, select.POLLOUT)
        self._lock = threading.RLock()
        self._torn = False  # the last write broke off in the middle of a line

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
        """Write all of the data, in pieces that a pipe which is not full takes without blocking; False if that
        fails."""
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
    """Put a `LossyStream` in place of `sys.stderr`, for everybody in this process who writes there."""
    if not isinstance(sys.stderr, LossyStream):
        sys.stderr = LossyStream(_descriptor(sys.stderr))
    return sys.stderr


def _descriptor(stream: TextIO | None) -> int:
    """Return a descriptor of our own for what a stream writes to, so that it does not block us, and blocks others as
    before.

    A file never blocks, and is not opened again: stdout may lead to it too, and would write at a place of its own.
    """
    fd = 2
    if stream is not None:
        with contextlib.suppress(OSError, ValueError):  # it is closed, or no file
            stream.flush()
            fd = stream.fileno()
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_APPEND | os.O_NONBLOCK)
    except OSError:  # a socket, or the terminal of another user
        pass
    try:
        return os.dup(fd)
    except OSError:  # it is closed: what is opened next must not become its place
        devnull_fd = os.open(os.devnull, os.O_WRONLY)
        return devnull_fd if devnull_fd == 2 else os.dup2(devnull_fd, 2)
