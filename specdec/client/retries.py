"""How often one call is tried, and how long."""

from __future__ import annotations

import random
import time

import grpc

from specdec.client.errors import DeadlineExceeded, Unavailable, from_rpc

_SHORTEST_PAUSE = 0.05  # seconds
_LONGEST_PAUSE = 2.0


class Retries:
    """The patience of one call: begins with it, and is spent by failures in a row."""

    def __init__(self, most: int, timeout: float | None) -> None:
        self._most = most
        self._failures = 0
        self._begin = time.monotonic()
        self._timeout = timeout

    @property
    def seconds_passed(self) -> float:
        """Since the call began."""
        return time.monotonic() - self._begin

    @property
    def seconds_left(self) -> float | None:
        """Until the caller's deadline; None if there is none."""
        return None if self._timeout is None else self._timeout - self.seconds_passed

    def progressed(self) -> None:
        """The failures so far no longer count."""
        self._failures = 0

    def pause(self, error: grpc.RpcError) -> float:
        """Seconds to wait before the next try; raises the error instead where there is to be none."""
        seen = from_rpc(error)
        if not isinstance(seen, Unavailable) or self._failures >= self._most:
            raise seen from error
        # Doubled each time and never the same for two clients, lest they all return at once.
        pause = _SHORTEST_PAUSE * (1 << min(self._failures, 6)) * random.uniform(1, 2)
        pause = max(min(pause, _LONGEST_PAUSE), seen.retry_after or 0.0)
        self._failures += 1
        left = self.seconds_left
        if left is not None and pause >= left:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise DeadlineExceeded(f"no time is left to try again after: {seen}", code=code) from error
        return pause
