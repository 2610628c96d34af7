"""Structured logs on stderr: JSON lines, or readable ones on a terminal."""

from __future__ import annotations

import logging
import sys

import structlog

CHATTY = ("torchao", "torch.utils._pytree")
"""Loggers of libraries that transformers loads wherever they are installed, and that then warn of what no model here
needs: their kernels for other processors, their own habits."""


def configure(service: str, level: str = "info") -> None:
    """Once, at the start of a process."""
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.getLevelNamesMapping()[level.upper()]),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service)
    for name in CHATTY:
        logging.getLogger(name).setLevel(logging.ERROR)
