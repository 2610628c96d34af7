"""The rotation: which of several servers is asked next. Each has its turn, except those that failed lately."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

_SHORTEST_REST = 1.0  # seconds
_LONGEST_REST = 10.0


class Rotation:
    """The servers of a client, shared by all of its calls and threads.

    Turns begin at a random server, lest all clients begin at the same one. A server that fails is left alone for a
    while, twice as long each time in a row; it is asked all the same where there is no other.
    """

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._turns = list(addresses)
        turn = random.randrange(len(self._turns))
        self._turns = self._turns[turn:] + self._turns[:turn]  # whose turn it is comes first
        self._rests = dict.fromkeys(addresses, (0.0, 0.0))  # (until when, how long)
        self._known: set[str] = set()  # have answered at any time
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def addresses(self) -> Collection[str]:
        return self._rests.keys()

    def take(self, failures: Mapping[str, int], left_out: Collection[str] = ()) -> str:
        """Return the address whose turn it is, for a call that has failed so often at each, and does not go to those
        that are `left_out`, which are not all."""
        with self._lock:
            now = self._clock()
            turns = [each for each in self._turns if each not in left_out]
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
        """Note that a server is there, if only to say no."""
        with self._lock:
            self._known.add(address)

    def is_known(self, address: str) -> bool:
        """Return True if a server has answered there before: if it is gone, it may well come back."""
        return address in self._known

    def failed(self, address: str) -> None:
        """Note that a server does not answer. All the calls that break off together count as one failure."""
        with self._lock:
            until, seconds = self._rests[address]
            now = self._clock()
            if until <= now:
                seconds = min(max(_SHORTEST_REST, 2 * seconds), _LONGEST_REST)
                self._rests[address] = (now + seconds, seconds)
