"""A circuit breaker (Nygard, "Release It!"): decides whether to try a pod.

When closed, it lets every session through. Failures open it. After a pause it is half-open and lets one session through
as a trial: success closes the breaker, failure opens it for twice as long. The breaker knows only the pod's name;
callers report outcomes to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal

import structlog

log = structlog.get_logger()

FAILURES = 3
"""Consecutive failures that open the breaker: one or two may be the fault of their sessions. A conclusive failure opens
it immediately."""

FIRST_OPEN_SECONDS = 0.25
MAX_OPEN_SECONDS = 1.0
"""Seconds that a breaker stays open: the first time, and at most. A trial costs one attempt of one session, and a
recovered pod should not idle for longer."""

TRIAL_SECONDS = 1.0
"""Timeout of a trial in seconds, equal to the longest pause after a failure. After a trial without an outcome, another
starts."""


class Breaker:
    """The circuit breaker of one pod."""

    def __init__(self, pod: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        self._pod = pod
        self._clock = clock
        self._failures = 0  # consecutive
        self._pause = 0.0  # seconds; 0: closed
        self._open_until = 0.0
        self._on_trial = False

    @property
    def state(self) -> Literal["closed", "open", "half-open"]:
        if not self._pause:
            return "closed"
        return "open" if self._clock() < self._open_until else "half-open"

    def attempt(self) -> None:
        """Record that the pod is about to be tried."""
        if self._pause:
            self._on_trial, self._open_until = True, self._clock() + TRIAL_SECONDS

    def succeeded(self) -> None:
        if self._pause:
            log.info("breaker_closed", pod=self._pod)
        self._failures, self._pause, self._on_trial = 0, 0.0, False

    def answered(self) -> None:
        """Record that the pod has refused a session. This passes a trial; outside one, earlier failures still count,
        since no step has succeeded."""
        if self._on_trial:
            self.succeeded()

    def failed(self, *, conclusive: bool = False) -> None:
        """Record a failure. `conclusive`: any session would have failed, as when the pod does not answer."""
        self._failures += 1
        if self._on_trial:
            self._open(min(2 * self._pause, MAX_OPEN_SECONDS))
        elif not self._pause and (conclusive or self._failures >= FAILURES):
            self._open(FIRST_OPEN_SECONDS)
        # Otherwise it has too few failures to open, or is open already and sessions begun earlier fail.

    def _open(self, pause: float) -> None:
        if not self._pause:
            log.warning("breaker_opened", pod=self._pod)
        self._pause, self._open_until, self._on_trial = pause, self._clock() + pause, False
