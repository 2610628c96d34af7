"""Captures log events, independently of other tests' logging configuration."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import structlog
from structlog.testing import capture_logs


@contextmanager
def captured_logs() -> Iterator[list[MutableMapping[str, Any]]]:
    """Yield a list that receives log events of every level."""
    before = structlog.get_config()
    structlog.reset_defaults()
    try:
        with capture_logs() as lines:
            yield lines
    finally:
        structlog.configure(**before)
