"""The phases of a start: each is logged as it begins, so that none is silent, and timed."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from specdec.engine.memory import give_freed_memory_back

log = structlog.get_logger()

ON_STDOUT = "SPECDEC_PHASES_ON_STDOUT"
"""Variable of the environment by which whoever starts a service as its child hears of phases as well."""

_seconds: dict[str, float] = {}
"""Seconds of each phase of this process, in the order in which they began."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log that a phase begins, and note its seconds when it ends. Phases of one name add up. What a phase has freed is
    given back to the system, lest the next one's comes on top of it."""
    log.info("starting", phase=name)
    if os.environ.get(ON_STDOUT):
        sys.stdout.write(f"starting {name}\n")
        sys.stdout.flush()
    begin = time.monotonic()
    try:
        yield
    finally:
        give_freed_memory_back()
        _seconds[name] = _seconds.get(name, 0.0) + time.monotonic() - begin


def seconds() -> dict[str, float]:
    """Return the seconds of all phases until now, to a hundredth."""
    return {name: round(each, 2) for name, each in _seconds.items()}


def log_end() -> None:
    """Log that the start is over, with the seconds of its phases."""
    log.info("started", seconds=seconds())
