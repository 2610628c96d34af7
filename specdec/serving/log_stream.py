"""A stderr that never raises and never blocks.

A disk that is full, a reader that has left and one that has stopped reading are no reason for a service to fail: a
line that cannot be written now is dropped and counted.
"""

from __future__ import annotations

import io
import os
import select
import sys
import threading
from typing import TextIO

MAX_LINE_BYTES = 1 << 16
"""A longer line is cut: what is logged is bounded before, so this is a mistake of ours that must not fill a disk."""


class LossyStream(io.TextIOBase):
    """Writes text to a file descriptor at once; `lost` counts the writes that could not be completed."""

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
        """Write all of it, in pieces that a pipe which is not full takes without blocking."""
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
    """A descriptor of our own of where a stream writes to, which outlives it."""
    try:
        assert stream is not None  # as in a process without a console
        stream.flush()
        return os.dup(stream.fileno())
    except (AssertionError, OSError, ValueError):  # closed, or no file at all
        return 2
