"""Structured logs on stderr: JSON lines, or readable ones on a terminal.

Logging never raises, never blocks and has a bounded volume, so that no log line can fail a request (`log_stream`,
`log_limits`). Library logs take the same path, as the event `library`.
"""

from __future__ import annotations

import logging
from typing import Any

import grpc
import structlog
from structlog.typing import EventDict, WrappedLogger

from specdec.serving.process.log_limits import LimitRate, cut_values
from specdec.serving.process.log_stream import LossyStream, guard_stderr

CHATTY = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that transformers imports if installed. Their warnings concern features unused here, such as
kernels for other processors."""


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
    """A logger that writes lines unbuffered. It has no lock: a thread logging while it logs would deadlock."""

    def __init__(self, stream: LossyStream) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        self._stream.write(f"{line}\n")

    log = debug = info = warning = error = critical = msg


class _ToStructlog(logging.Handler):
    """A handler that passes records of the standard library's logging to structlog."""

    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger()
        if record.exc_info and isinstance(record.exc_info[1], grpc.aio.InternalError):
            # gRPC logs this when a status or message meets a caller that has just left: not an error.
            log.debug("caller_left", message=_message(record))
            return
        level = min(max(record.levelno // 10 * 10, logging.DEBUG), logging.CRITICAL)  # libraries have levels in between
        log.log(level, "library", logger=record.name, message=_message(record), exc_info=record.exc_info)


def _message(record: logging.LogRecord) -> str:
    """Return a record's text, even if its arguments do not match its format."""
    try:
        return record.getMessage()
    except Exception:
        return str(record.msg)
