"""Whether a pod is worth asking: a circuit breaker (Nygard, "Release It!").

Closed, it lets everybody through. Failures open it; after a pause it is half-open and lets one through, whose success
closes it and whose failure opens it for twice as long. It knows no more of its pod than the name: whoever asks one
reports here.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import structlog

log = structlog.get_logger()

FAILURES = 3
"""In a row, after which a pod is left alone; one that says all is enough."""

SHORTEST_PAUSE = 0.25
LONGEST_PAUSE = 1.0
"""Seconds."""

TRIAL_SECONDS = 1.0
"""For a trial to succeed or fail. After one that did neither, there may be another."""


class Breaker:
    """Of one pod."""

    def __init__(self, pod: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._pod = pod
        self._clock = clock
        self._failures = 0  # in a row
        self._pause = 0.0  # seconds; 0: it is closed
        self._open_until = 0.0
        self._on_trial = False

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if not self._pause:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    def attempt(self) -> None:
        """Somebody goes through."""
        if self._pause:
            self._on_trial, self._open_until = True, self._clock() + TRIAL_SECONDS

    def succeeded(self) -> None:
        if self._pause:
            log.info("pod_back", pod=self._pod)
        self._failures, self._pause, self._on_trial = 0, 0.0, False

    def failed(self, *, conclusive: bool = False) -> None:
        """`conclusive`: anybody would have found the same, as that the pod does not answer."""
        self._failures += 1
        if self._on_trial:
            self._open(min(2 * self._pause, LONGEST_PAUSE))
        elif not self._pause and (conclusive or self._failures >= FAILURES):
            self._open(SHORTEST_PAUSE)
        # Else it is open already: those who went through before find the same one after another.

    def _open(self, pause: float) -> None:
        if not self._pause:
            log.warning("pod_left_alone", pod=self._pod)
        self._pause, self._open_until, self._on_trial = pause, self._clock() + pause, False
