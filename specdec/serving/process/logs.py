"""Structured logs on stderr: JSON lines, or readable ones on a terminal.

Logging never raises, never blocks and has a bounded volume, so that no log line can fail a request. A line that cannot
be written immediately, because of a full disk, a closed pipe or a stalled reader, is dropped and counted. The length of
values and the rate of each event are limited, so the volume depends on the number of event kinds of a service, not on
the number of requests. Library logs take the same path, as the event `library`.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import stat
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TextIO

import grpc
import structlog
from structlog.typing import EventDict, WrappedLogger

from specdec.serving.callers.token_bucket import TokenBucket

log = structlog.get_logger()


MAX_VALUE_CHARACTERS = 2000
MAX_TRACEBACK_CHARACTERS = 8000

BURST = 100
"""Maximum lines of one event in a burst."""

LINES_A_SECOND = 10.0
"""Maximum lines of one event per second in the long run."""


def cut_values(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
    """Truncate long values; a traceback keeps its end, which names the error."""
    for key, value in event.items():
        text = value if isinstance(value, str) else str(value) if isinstance(value, list | dict | tuple) else ""
        if key == "exception" and len(text) > MAX_TRACEBACK_CHARACTERS:
            event[key] = f"... {text[-MAX_TRACEBACK_CHARACTERS:]}"
        elif key != "exception" and len(text) > MAX_VALUE_CHARACTERS:
            event[key] = f"{text[:MAX_VALUE_CHARACTERS]} ... ({len(text)} characters)"
    return event


@dataclass
class _Allowance:
    """The allowance of one event."""

    lines: TokenBucket
    suppressed: int = 0


class LimitRate:
    """Drops lines of an event above its rate; the event's next line reports their number as `suppressed`.

    Critical lines always pass: they say why the process ends itself.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._allowances = defaultdict[str, _Allowance](
            lambda: _Allowance(TokenBucket(LINES_A_SECOND, BURST, clock=clock))
        )
        self._lock = threading.RLock()  # reentrant: garbage collection may log while it is held

    def __call__(self, _: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if method == "critical":
            return event
        with self._lock:
            allowance = self._allowances[str(event.get("event"))]
            if allowance.lines.seconds_until():
                allowance.suppressed += 1
                raise structlog.DropEvent
            allowance.lines.spend()
            if allowance.suppressed:
                event["suppressed"], allowance.suppressed = allowance.suppressed, 0
        return event


MAX_LINE_BYTES = 1 << 16
"""Maximum bytes of a line; longer ones are cut. Values are truncated earlier, so a longer line is a bug here, which
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
        """Write all data in pieces of PIPE_BUF bytes, which never block on a pipe reported writable; return False on
        failure."""
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
    """Replace `sys.stderr` by a `LossyStream`, for all writers in this process, and return it. A stream in memory, such
    as a test runner's, stays in place, since it never blocks."""
    if isinstance(sys.stderr, LossyStream):
        return sys.stderr
    guarded = LossyStream(_descriptor(sys.stderr))
    if not _in_memory(sys.stderr):
        sys.stderr = guarded
    return guarded


def _in_memory(stream: TextIO | None) -> bool:
    try:
        if stream is not None:
            stream.fileno()
    except io.UnsupportedOperation:
        return True
    except (OSError, ValueError):  # closed
        pass
    return False


def _descriptor(stream: TextIO | None) -> int:
    """Return a non-blocking descriptor for a stream's target, leaving the target blocking for other writers.

    A regular file never blocks and is not reopened: if it is also stdout's, both must share one write position.
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
    except OSError:  # closed: the next opened file must not get number 2
        devnull_fd = os.open(os.devnull, os.O_WRONLY)
        return devnull_fd if devnull_fd == 2 else os.dup2(devnull_fd, 2)


CHATTY = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that transformers imports if installed. They warn about features unused here, such as kernels
for other processors."""


def configure(service: str, level: str = "info") -> None:
    """Set up logging for this process; call it once, at the start."""
    stream = guard_stderr()
    number = logging.getLevelNamesMapping()[level.upper()]

    def count_lost(_: WrappedLogger, __: str, event: EventDict) -> EventDict:
        """Add the number of lines lost so far, if any, to a line."""
        return {**event, "lost_lines": stream.lost} if stream.lost else event

    class Logger(structlog.make_filtering_bound_logger(number)):  # type: ignore[misc]
        """A logger that counts the lines it fails to log."""

        def _proxy_to_logger(self, *args: Any, **values: Any) -> Any:
            try:
                return super()._proxy_to_logger(*args, **values)
            except Exception:  # for example a value that cannot be rendered
                stream.lost += 1

    structlog.configure(
        processors=[
            LimitRate(),
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            cut_values,
            count_lost,
            _renderer(stream),
        ],
        wrapper_class=Logger,
        logger_factory=lambda *_: _Lines(stream),
    )
    structlog.contextvars.bind_contextvars(service=service)
    logging.basicConfig(handlers=[_ToStructlog()], level=logging.WARNING, force=True)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)


def _renderer(stream: LossyStream) -> structlog.typing.Processor:
    return structlog.dev.ConsoleRenderer() if stream.isatty() else structlog.processors.JSONRenderer()


class _Lines:
    """A logger that writes lines unbuffered. structlog's own loggers lock, so a thread that logs while logging would
    deadlock."""

    def __init__(self, stream: LossyStream) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        self._stream.write(f"{line}\n")

    log = debug = info = warning = error = critical = msg


class _ToStructlog(logging.Handler):
    """A handler that passes records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError):
            # gRPC logs this when the caller has left before a status or message is sent: no error.
            log.debug("caller_left", message=_message(record))
            return
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)  # libraries use levels in between
        log.log(level, "library", logger=record.name, message=_message(record), exc_info=record.exc_info)


def _message(record: logging.LogRecord) -> str:
    """Return a record's text, even if its arguments do not match its format."""
    try:
        return record.getMessage()
    except Exception:
        return str(record.msg)
