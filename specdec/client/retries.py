"""The retries of one call: to which server, how often, and for how long."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import grpc

from specdec.client.errors import Cancelled, DeadlineExceeded, Overloaded, SpecdecError, from_rpc, is_loss
from specdec.wire.address import may_be_several

_MIN_REST = 1.0  # seconds
_MAX_REST = 10.0


class Rotation:
    """The servers of a client, shared by all of its calls and threads.

    It starts at a random server, so that clients do not all start at the same one. A server rests after a failure: for
    1 s, and twice as long after each consecutive one, up to 10 s. Calls prefer servers that do not rest (`pick`).
    """

    def __init__(self, addresses: Sequence[str], clock: Callable[[], float] = time.monotonic) -> None:
        self._turns = list(addresses)
        turn = random.randrange(len(self._turns))
        self._turns = self._turns[turn:] + self._turns[:turn]  # next one first
        self._rests = dict.fromkeys(addresses, (0.0, 0.0))  # (end of the rest, its length in seconds)
        self._known: set[str] = set()  # addresses that have ever answered
        self._clock = clock
        self._lock = threading.Lock()

    @property
    def addresses(self) -> Collection[str]:
        return self._rests.keys()

    def pick(self, failures: Mapping[str, int], left_out: Collection[str] = ()) -> str:
        """Return the next address to try: fewest `failures` of this call first, then the shortest remaining rest, then
        the order of the rotation. `left_out` must not cover all addresses."""
        with self._lock:
            now = self._clock()
            turns = [turn for turn in self._turns if turn not in left_out]
            address = min(turns, key=lambda a: (failures.get(a, 0), max(0.0, self._rests[a][0] - now)))
            self._turns.remove(address)
            self._turns.append(address)
            return address

    def answered(self, address: str) -> None:
        """Note that a server answers."""
        with self._lock:
            self._known.add(address)
            self._rests[address] = (0.0, 0.0)

    def refused(self, address: str) -> None:
        """Note that a server exists although it refused a call."""
        with self._lock:
            self._known.add(address)

    def is_known(self, address: str) -> bool:
        """Return True if a server has answered at this address before, so that it may return after an outage."""
        return address in self._known

    def failed(self, address: str) -> None:
        """Note that a server does not answer. Calls broken at the same time count as a single failure."""
        with self._lock:
            until, seconds = self._rests[address]
            now = self._clock()
            if until <= now:
                seconds = min(max(_MIN_REST, 2 * seconds), _MAX_REST)
                self._rests[address] = (now + seconds, seconds)


_MIN_PAUSE = 0.05  # seconds
_MAX_PAUSE = 2.0
_MAX_RETRY_AFTER = 60.0  # cap on a server's `retry_after`
_RETURN_SECONDS = 10.0
"""Minimum seconds to wait for the return of a server that has answered before: restarting an orchestrator, as in
`specdec up`, takes several seconds."""
_ROOM_SECONDS = 90.0
"""Minimum seconds for which a text in progress waits for room at a server: at a tenant's limit, places become free only
as other texts end."""
_PERMANENT_TRIES_OF_A_NAME = 3
"""Permanent refusals (`_PERMANENT`) after which a name is given up. A name may resolve to several servers, and each try
reaches the next one."""
_WAITED = ("DRAFT_REQUIRED", "VERIFIER_LOST")
_PERMANENT = ("MODEL_CHANGED", "MODEL_UNREADABLE", "PROMPT_CHANGED", *_WAITED)
"""Reasons for a permanent refusal: the server has another model or chat template, cannot read the model, or has waited
in vain for a draft or a verifier. Another server may serve the text; this one will not soon. A refusal after a wait
(`_WAITED`) gives up a name at once, since the wait has taken long."""
_PERMANENT_ONCE_BEGUN = (*_PERMANENT, "UNKNOWN_MODEL")
"""The same for a text in progress: a server may not yet, or no longer, know the text's revision."""


class Retries:
    """The retries of one call: created when it starts, consumed by consecutive failures."""

    def __init__(
        self,
        rotation: Rotation,
        most: int,
        timeout: float | None,
        is_closed: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start a call. `is_closed` returns True if the client was closed since then, which cancels the call."""
        self._clock = clock
        self._rotation = rotation
        self._is_closed = is_closed
        self._most = most
        self._failures: Counter[str] = Counter()  # consecutive ones, by address
        self._permanent: Counter[str] = Counter()  # permanent refusals among these
        self._left_out: set[str] = set()  # addresses given up
        self._refusal: SpecdecError | None = None  # of an address given up, or of a full server: the last one
        self._full = False  # one of the consecutive failures was a full server's
        self._failing_since = 0.0  # time of the first of the consecutive failures
        self._begin = clock()
        self._timeout = timeout
        self.address = rotation.pick(self._failures)
        """Address of the next try."""

    @property
    def seconds_passed(self) -> float:
        """Seconds since the call began."""
        return self._clock() - self._begin

    @property
    def seconds_left(self) -> float | None:
        """Seconds until the caller's deadline; None if there is none."""
        return None if self._timeout is None else self._timeout - self.seconds_passed

    def progressed(self) -> None:
        """Reset the failure counts after a response."""
        self._failures.clear()
        self._permanent.clear()
        self._left_out.clear()
        self._refusal, self._full = None, False
        self._rotation.answered(self.address)

    def check_open(self) -> None:
        """Raise Cancelled if the client was closed after the call began: another try would reconnect it."""
        if self._is_closed():
            raise Cancelled("the client was closed", code=grpc.StatusCode.CANCELLED)

    def pause(self, error: grpc.RpcError, *, begun: bool = False) -> float:
        """Return the seconds to wait before the next try, at the new `address`; raise the error if no try is left, or
        DeadlineExceeded if the wait would outlast the timeout.

        If the server is full, the error is raised, unless the text has `begun`: then the call waits for room. After
        permanent refusals the address is given up; the other addresses are still tried and waited for.
        """
        seen = from_rpc(error)
        if seen.reason:  # only servers give reasons
            self._rotation.refused(self.address)
        full, lost = isinstance(seen, Overloaded), is_loss(seen)
        permanent = seen.reason in (_PERMANENT_ONCE_BEGUN if begun else _PERMANENT)
        if not (lost or permanent or (full and begun)) or (isinstance(seen, Cancelled) and self._is_closed()):
            raise seen from error
        if not self._failures:
            self._failing_since = self._clock()
        self._failures[self.address] += 1
        if permanent:
            self._permanent[self.address] += 1
            if seen.reason in _WAITED or self._permanent[self.address] >= _most_permanent(self.address):
                self._left_out.add(self.address)
                self._refusal = seen
        elif lost:
            self._rotation.failed(self.address)
        else:
            self._refusal, self._full = seen, True
        if self._left_out.issuperset(self._rotation.addresses):
            raise seen from error
        self.address = self._rotation.pick(self._failures, self._left_out)
        again = self._failures[self.address]
        if again > self._most and not self._may_recover:
            raise (self._refusal or seen) from error  # a refusal explains more than a lost connection
        if not again:
            return 0.0  # another server may work: no pause
        # Exponential back-off with jitter, so that clients do not return at the same time.
        pause = _MIN_PAUSE * (1 << min(again - 1, 6)) * random.uniform(1, 2)
        pause = max(min(pause, _MAX_PAUSE), min(seen.retry_after or 0.0, _MAX_RETRY_AFTER))
        left = self.seconds_left
        if left is not None and pause >= left:
            code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise DeadlineExceeded(
                f"the timeout leaves no time for a retry: {seen}", code=code, reason=seen.reason
            ) from error
        return pause

    @property
    def _may_recover(self) -> bool:
        """True while it is too early to give up on a server that has answered before, or that is full; False if the
        caller wants no retries."""
        known = any(self._rotation.is_known(address) for address in self._failures if address not in self._left_out)
        patience = _ROOM_SECONDS if self._full else _RETURN_SECONDS if known else 0.0
        return self._most > 0 and self._clock() - self._failing_since < patience


def _most_permanent(address: str) -> int:
    return _PERMANENT_TRIES_OF_A_NAME if may_be_several(address) else 1
