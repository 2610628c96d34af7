"""Token buckets (Turner 1986): rate limits that allow bursts."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from functools import partial

Clock = Callable[[], float]
"""Returns seconds."""


class TokenBucket:
    """Refills at `rate` tokens per second, up to `burst`. It may go into debt, up to `max_debt`, since the cost of a
    text is known only after the fact."""

    __slots__ = ("_clock", "_filled_at", "_min_tokens", "_tokens", "burst", "rate")

    def __init__(self, rate: float, burst: float, max_debt: float = math.inf, clock: Clock = time.monotonic) -> None:
        """Start with a full bucket."""
        self.rate = rate
        self.burst = burst
        self._min_tokens = -max_debt
        self._clock = clock
        self._tokens = burst
        self._filled_at = clock()

    def spend(self, tokens: float = 1.0) -> bool:
        """Take tokens; return whether the bucket held enough."""
        there = self._fill()
        self._tokens = max(self._min_tokens, there - tokens)
        return there >= tokens

    def seconds_until(self, tokens: float = 1.0) -> float:
        """Return the seconds until the bucket holds `tokens` or is full, if nothing is spent meanwhile."""
        return max(0.0, (min(tokens, self.burst) - self._fill()) / self.rate)

    def change(self, rate: float, burst: float) -> None:
        """Change rate and burst. Debt and savings are kept, up to the new burst."""
        self._tokens = min(self._fill(), burst)
        self.rate, self.burst = rate, burst

    def _fill(self) -> float:
        """Refill; return the current tokens."""
        now = self._clock()
        self._tokens = min(self.burst, self._tokens + (now - self._filled_at) * self.rate)
        self._filled_at = now
        return self._tokens


class TokenBuckets:
    """A bucket per key, full at first. The `max_keys` most recently used are kept."""

    def __init__(
        self, rate: float, burst: float, max_keys: int, max_debt: float = math.inf, clock: Clock = time.monotonic
    ) -> None:
        self._make = partial(TokenBucket, rate, burst, max_debt, clock)
        self._max_keys = max_keys
        self._buckets: OrderedDict[Hashable, TokenBucket] = OrderedDict()

    def __len__(self) -> int:
        return len(self._buckets)

    def of(self, key: Hashable) -> TokenBucket:
        found = self._buckets.get(key)
        if found is None:
            found = self._buckets[key] = self._make()
            if len(self._buckets) > self._max_keys:
                self._buckets.popitem(last=False)
        else:
            self._buckets.move_to_end(key)
        return found

    def wait(self, key: Hashable) -> float:
        """Take a token from a key's bucket and return 0.0. If it is empty, return the seconds until it has a token."""
        bucket = self.of(key)
        if seconds := bucket.seconds_until():
            return seconds
        bucket.spend()
        return 0.0
