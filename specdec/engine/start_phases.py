"""The phases of a start: timed, and logged when they begin, so that none is silent."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from specdec.engine.memory import give_freed_memory_back

log = structlog.get_logger()

ON_STDOUT = "SPECDEC_PHASES_ON_STDOUT"
"""Environment variable by which a parent process requests phases on stdout as well."""

EXPORT = "export"
"""The phase of a draft's export."""

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, the bytes done, and the total bytes."""

PROGRESS_SECONDS = 2.0
MIN_PROGRESS_BYTES = 100_000_000
"""Minimum bytes of work whose progress is reported."""

_seconds: dict[str, float] = {}
"""Seconds of each phase of this process, in order of their beginning."""


@contextmanager
def phase(name: str) -> Iterator[None]:
    """Log the beginning of a phase, and record its seconds at the end. Phases of the same name add up. Memory freed by
    a phase is returned to the system, so that it does not raise the next phase's peak."""
    report(name)
    begin = time.monotonic()
    try:
        yield
    finally:
        give_freed_memory_back()
        _seconds[name] = _seconds.get(name, 0.0) + time.monotonic() - begin


def progress_to(say: Callable[[str], None]) -> Progress:
    """Return a function that reports progress in words, at most every PROGRESS_SECONDS, for work of at least
    MIN_PROGRESS_BYTES."""
    last = time.monotonic()

    def progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if total >= MIN_PROGRESS_BYTES and time.monotonic() - last >= PROGRESS_SECONDS:
            last = time.monotonic()
            say(f"{what}, {done / 1e9:.2f} of {total / 1e9:.2f} GB")

    return progress


def is_progress(reported: str) -> bool:
    """Return True if a report of a start is progress within its phase, not a new phase."""
    return ", " in reported


def report(what: str) -> None:
    """Log what a start is doing, and report it to a parent process that requested it."""
    log.info("starting", phase=what)
    if os.environ.get(ON_STDOUT):
        sys.stdout.write(f"starting {what}\n")
        sys.stdout.flush()


def seconds() -> dict[str, float]:
    """Return the seconds of all phases so far, to a hundredth."""
    return {name: round(duration, 2) for name, duration in _seconds.items()}


def log_end() -> None:
    """Log the end of the start, with the seconds of its phases."""
    log.info("started", seconds=seconds())
