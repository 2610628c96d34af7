"""How much the services of this process would write into their logs, and whether any of it tells of a bug."""

from __future__ import annotations

import logging
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog

KEPT = 5
"""Bugs told in full."""

CALLER_LEFT = "ExecuteBatchError raised in core"
"""What gRPC says when a status meets a caller that has just left, as at a deadline."""


class LogVolume:
    """Counts what is logged, instead of printing it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.lines = 0
        self.bugs: list[str] = []
        self._render = structlog.processors.JSONRenderer()

    def count(self, logger: Any, name: str, event: MutableMapping[str, Any]) -> str:
        """Take an event of structlog's."""
        if event.get("exc_info") and len(self.bugs) < KEPT:
            self.bugs.append(repr(event)[:500])
        self.bytes += len(self._render(logger, name, event)) + 1
        self.lines += 1
        raise structlog.DropEvent


class _Bugs(logging.Handler):
    """Hears of what asyncio and gRPC found nobody to tell: exceptions of tasks and of servicers."""

    def __init__(self, volume: LogVolume) -> None:
        super().__init__(logging.ERROR)
        self._volume = volume

    def emit(self, record: logging.LogRecord) -> None:
        if record.getMessage().startswith(CALLER_LEFT):
            return
        self._volume.bugs.append(f"{record.name}: {record.getMessage()[:300]} {record.exc_info}")


@contextmanager
def measured() -> Iterator[LogVolume]:
    """What is logged inside is counted as a service's own configuration would write it."""
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
