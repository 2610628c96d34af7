"""The volume of log output of this process's services, and the bugs that it reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

KEPT = 5
"""Bugs reported in full."""

CALLER_LEFT = "ExecuteBatchError raised in core"
"""gRPC's message for a status sent to a caller that has just left, as at a deadline."""


class LogVolume:
    """Counts log output instead of printing it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lines = 0
        self.bugs: list[str] = []
        self._render = structlog.processors.JSONRenderer()

    def count(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        """Process a structlog event."""
        if event.get("exc_info") and len(self.bugs) < KEPT:
            self.bugs.append(repr(event)[:500])
        self.bytes += len(self._render(logger, name, event)) + 1
        self.lines += 1
        raise structlog.DropEvent


class _Bugs(logging.Handler):
    """Receives unhandled exceptions of tasks and servicers from asyncio and gRPC."""

    def __init__(self, volume: LogVolume) -> None:
        super().__init__(logging.ERROR)
        self._volume = volume

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(CALLER_LEFT):
            return
        self._volume.bugs.append(f"{record.name}: {record.getMessage()[:300]} {record.exc_info}")


@contextmanager
def measured() -> Iterator[LogVolume]:
    """Count the log output of the context, formatted as by a service's own configuration."""
    volume, before = LogVolume(), structlog.get_config()
    handler = _Bugs(volume)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            volume.count,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    logging.getLogger().addHandler(handler)
    try:
        yield volume
    finally:
        logging.getLogger().removeHandler(handler)
        structlog.configure(**before)
