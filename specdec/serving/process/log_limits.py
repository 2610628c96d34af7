"""Limits on logs: the length of values and the rate of each event.

Both are structlog processors. With them the log volume depends on the number of event kinds of a service, not on the
number of requests, good or bad.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import structlog
from structlog.typing import EventDict, WrappedLogger

MAX_VALUE_CHARACTERS = 2000
MAX_TRACEBACK_CHARACTERS = 8000

BURST = 100
"""Burst of one event in lines."""

LINES_A_SECOND = 10.0
"""Long-run rate of one event in lines per second."""


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
    """The token bucket of one event."""

    lines: float = BURST
    filled_at: float = 0.0
    suppressed: int = 0


class LimitRate:
    """Drops lines of an event above its rate; the next line of it has their number as `suppressed`.

    Critical lines always pass: a process logs one when it ends.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allowances: dict[str, _Allowance] = {}
        self._lock = threading.RLock()  # reentrant: garbage collection may log while it is held

    def __call__(self, _: WrappedLogger, method: str, event: EventDict) -> EventDict:
        if method == "critical":
            return event
        now = self._clock()
        with self._lock:
            allowance = self._allowances.setdefault(str(event.get("event")), _Allowance(filled_at=now))
            allowance.lines = min(BURST, allowance.lines + LINES_A_SECOND * (now - allowance.filled_at))
            allowance.filled_at = now
            if allowance.lines < 1:
                allowance.suppressed += 1
                raise structlog.DropEvent
            allowance.lines -= 1
            if allowance.suppressed:
                event["suppressed"], allowance.suppressed = allowance.suppressed, 0
        return event
