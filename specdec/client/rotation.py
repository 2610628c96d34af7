"""The rotation of a client's servers: round robin, skipping those that failed recently."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

_MIN_REST = 1.0  # seconds
_MAX_REST = 10.0


class Rotation:
    """The servers of a client, shared by all of its calls and threads.

    It starts at a random server, so that clients do not all start at the same one. A failed server rests, twice as long
    after each consecutive failure; it is still tried if there is no other.
    """

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._turns = list(addresses)
        turn = random.randrange(len(self._turns))
        self._turns = self._turns[turn:] + self._turns[:turn]  # the next one comes first
        self._rests = dict.fromkeys(addresses, (0.0, 0.0))  # (end of the rest, its length in seconds)
        self._known: set[str] = set()  # have ever answered
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def addresses(self) -> Collection[str]:
        return self._rests.keys()

    def take(self, failures: Mapping[str, int], left_out: Collection[str] = ()) -> str:
        """Return the next address to try: fewest `failures` of this call first, then the shortest remaining rest, then
        its turn. `left_out` must not cover all addresses."""
        with self._lock:
            now = self._clock()
            turns = [turn for turn in self._turns if turn not in left_out]
            address = min(turns, key=lambda a: (failures.get(a, 0), max(0.0, self._rests[a][0] - now)))
            self._turns.remove(address)
            self._turns.append(address)
            return address

    def answered(self, address: str) -> None:
        """Note that a server works."""
        with self._lock:
            self._known.add(address)
            self._rests[address] = (0.0, 0.0)

    def refused(self, address: str) -> None:
        """Note that a server exists, although it refused a call."""
        with self._lock:
            self._known.add(address)

    def is_known(self, address: str) -> bool:
        """Return True if a server has answered at this address before: after an outage it may well return."""
        return address in self._known

    def failed(self, address: str) -> None:
        """Note that a server does not answer. Calls broken at the same time count as one failure."""
        with self._lock:
            until, seconds = self._rests[address]
            now = self._clock()
            if until <= now:
                seconds = min(max(_MIN_REST, 2 * seconds), _MAX_REST)
                self._rests[address] = (now + seconds, seconds)
