"""The guard closes or mutes connections that make only wasted calls: refused ones, immediately reset ones, and calls
that need no authorization.

A refused call still takes a sixth of a millisecond of the event loop, so a caller without a key could saturate it with
some thousands per second. Each connection has a budget for such calls. So has each address, because a caller may open
any number of connections. A connection that also carries calls of authorized callers is left alone: it may be a
proxy's, with all kinds of callers behind it.

The guard sees only calls and connections; `interceptor.py` deals with keys, methods and statuses.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import structlog

from specdec.serving.callers.sockets import Peer, end_connections, network_of, parse_peer
from specdec.serving.callers.token_bucket import TokenBucket, TokenBuckets

log = structlog.get_logger()

EARLY_SECONDS = 0.1
"""Age below which a call cancelled by its client counts as reset: too short to have read an answer."""

TRUSTED_SECONDS = 60.0
"""Seconds that a connection stays trusted after a served call: a proxy's callers come and go."""

CONNECTION_BURST, CONNECTION_RATE = 100.0, 100.0
"""Wasted calls that a connection may make in a burst, and per second in the long run. A server of the OpenAI API checks
at most about fifty unknown keys per second: its connection must stay open even while none of its callers has a key."""

ADDRESS_BURST, ADDRESS_RATE = 400.0, 200.0
"""The same for an address, over all its connections: a thirtieth of a core. Beyond it, every connection may still waste
`MIN_WASTED` calls."""

MAX_DEBT = 12_000.0
"""Maximum debt of an address in calls: its budget recovers within a minute after its calls stop."""

MIN_WASTED = 1
"""Wasted calls that every connection may make, so that its caller can read the reason of the refusal."""

MUTED_SECONDS = 20.0
"""Seconds that a connection stays open but unread, once its address is beyond its budget, before it is closed. After an
immediate close, the caller would return immediately, with a hundred calls on its new connection."""

MAX_MUTED = 512
"""Maximum number of muted connections; beyond it the oldest is closed."""

MAX_CONNECTIONS = MAX_ADDRESSES = 8192
"""Maximum connections and addresses remembered, the most recent ones; about 1 KB each."""

SWEEP_SECONDS = 0.01
"""Minimum seconds between scans of this process's sockets; one scan closes all connections due."""

LOOK_SECONDS = 1.0
"""Maximum seconds between scans while connections are muted, since some become due or disappear."""

LOG_SECONDS = 10.0
"""Minimum seconds between log lines about wasted calls."""

LOGGED_CALLS = 50
"""Minimum number of wasted calls in that time for a log line: callers that cancel, or retry with an old key, make
fewer."""

refused_calls: Counter[str] = Counter()
"""Number of calls that this process refused without reading their requests, by reason."""


@dataclass(slots=True, eq=False)
class CallerConnection:
    """A caller's connection."""

    name: str  # gRPC's
    peer: Peer
    budget: TokenBucket  # for wasted calls
    wasted: int = 0
    served_at: float | None = None  # last time a call was served or outlived EARLY_SECONDS
    closed: bool = False
    inode: int | None = None  # of its socket; None before the first scan
    calls: dict[GuardedCall, None] = field(default_factory=dict)  # running calls, oldest first

    def is_trusted(self, now: float) -> bool:
        """Return True if a running call is at least EARLY_SECONDS old, or if a call was served recently."""
        oldest = next(iter(self.calls), None)
        if oldest is not None and now - oldest.begun_at >= EARLY_SECONDS:
            return True
        return self.served_at is not None and now - self.served_at < TRUSTED_SECONDS


@dataclass(slots=True, eq=False)
class GuardedCall:
    """A call of an authorized caller."""

    connection: CallerConnection | None  # None: the transport has no address
    begun_at: float


class ConnectionGuard:
    """The connections of a server. Belongs to the event loop."""

    def __init__(
        self,
        end_connections: Callable[[Mapping[Peer, int | None], Collection[Peer]], Mapping[Peer, int]] = end_connections,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.wasted_calls = 0
        self.closed_connections = 0
        self._end_connections = end_connections
        self._clock = clock
        self._connections: OrderedDict[str, CallerConnection] = OrderedDict()  # by gRPC's peer name, latest last
        self._addresses = TokenBuckets(ADDRESS_RATE, ADDRESS_BURST, MAX_ADDRESSES, MAX_DEBT, clock)
        # Health checks have separate budgets: other clients of an address must not get a load balancer's probes muted.
        self._open_addresses = TokenBuckets(ADDRESS_RATE, ADDRESS_BURST, MAX_ADDRESSES, MAX_DEBT, clock)
        self._closing: dict[Peer, None] = {}
        self._muting: dict[Peer, None] = {}
        self._muted: OrderedDict[Peer, tuple[float, int]] = OrderedDict()  # time of muting and inode, oldest first
        self._wanted = asyncio.Event()  # set when there are connections to close or mute
        self._sweep: asyncio.Task[None] | None = None
        self._counted_from, self._logged_at = clock(), -math.inf
        self._calls_before, self._closed_told = 0, 0  # wasted calls before `_counted_from`; closures logged

    @property
    def remembered(self) -> tuple[int, int]:
        """Numbers of remembered connections and addresses."""
        return len(self._connections), len(self._addresses)

    def refuse(self, peer: str, why: str) -> None:
        """Count a refused call, and charge it to its connection and address."""
        refused_calls[why] += 1
        self._count(peer, why)
        self._waste(peer, self._addresses)

    def charge_open_call(self, peer: str) -> None:
        """Charge a call of an open service like a refused one: it does not prove that its caller is authorized."""
        self._waste(peer, self._open_addresses)

    def begin(self, peer: str) -> GuardedCall:
        """Register a call of an authorized caller; `serve` or `reset` ends it."""
        call = GuardedCall(self._connection(peer), self._clock())
        if call.connection is not None:
            call.connection.calls[call] = None
        return call

    def serve(self, call: GuardedCall) -> None:
        """End a call that was answered."""
        if (connection := call.connection) is not None:
            del connection.calls[call]
            connection.served_at = self._clock()

    def reset(self, call: GuardedCall) -> None:
        """End a call cancelled by its client."""
        if (connection := call.connection) is not None:
            if self._clock() - call.begun_at >= EARLY_SECONDS:
                self.serve(call)
                return
            del connection.calls[call]
            self._count(connection.name, "RESET")
            self._spend(connection, self._addresses, mutes=False)  # authorized callers' connections are not muted

    def _waste(self, peer: str, addresses: TokenBuckets) -> None:
        connection = self._connection(peer)
        if connection is not None and not connection.calls:  # authorized calls are not cut off for refused ones
            self._spend(connection, addresses)

    def _spend(self, connection: CallerConnection, addresses: TokenBuckets, *, mutes: bool = True) -> None:
        """Charge a wasted call to both budgets, unless its connection is trusted; close or mute the connection when one
        is exhausted."""
        if connection.is_trusted(self._clock()):
            return
        connection.wasted += 1
        address_has = addresses.of(network_of(connection.peer[0])).spend()
        connection_has = connection.budget.spend()
        # Above the address's budget, mute: closing would only let the caller return with a fresh connection budget.
        if not address_has and connection.wasted > MIN_WASTED:
            self._end(connection, self._muting if mutes else self._closing)
        elif not connection_has or connection.closed:
            self._end(connection, self._closing)

    def _count(self, peer: str, why: str) -> None:
        """Count a wasted call. At most once in LOG_SECONDS, log the calls since the last line if they are many, or if
        connections were closed."""
        now = self._clock()
        if now - self._counted_from >= LOG_SECONDS and self.wasted_calls - self._calls_before < LOGGED_CALLS:
            self._counted_from, self._calls_before = now, self.wasted_calls
        self.wasted_calls += 1
        calls, closed = self.wasted_calls - self._calls_before, self.closed_connections - self._closed_told
        if (calls >= LOGGED_CALLS or closed) and now - self._logged_at >= LOG_SECONDS:
            log.warning(
                "calls_wasted",
                peer=peer,  # of the latest wasted call, with its reason
                why=why,
                calls=calls,
                closed_connections=closed,
                seconds=round(now - self._counted_from, 1),
            )
            self._counted_from = self._logged_at = now
            self._calls_before, self._closed_told = self.wasted_calls, self.closed_connections

    def _connection(self, peer: str) -> CallerConnection | None:
        found = self._connections.get(peer)
        if found is not None:
            self._connections.move_to_end(peer)
            return found
        parsed = parse_peer(peer)
        if parsed is None:
            return None
        budget = TokenBucket(CONNECTION_RATE, CONNECTION_BURST, 0.0, self._clock)
        self._connections[peer] = found = CallerConnection(peer, parsed, budget)
        for _ in range(max(0, len(self._connections) - MAX_CONNECTIONS)):
            name, oldest = self._connections.popitem(last=False)
            if oldest.calls:
                self._connections[name] = oldest
        return found

    def _end(self, connection: CallerConnection, manner: dict[Peer, None]) -> None:
        """Schedule a connection to be closed or muted. It stays on record, since more of its calls may arrive."""
        if connection.peer in self._muted:
            return
        if not connection.closed:
            connection.closed = True
            self.closed_connections += 1
        manner[connection.peer] = None
        self._wanted.set()
        if self._sweep is None or self._sweep.done():
            self._sweep = asyncio.create_task(self._end_all())

    async def _end_all(self) -> None:
        """Close and mute the scheduled connections, and close muted ones after MUTED_SECONDS, until none is left."""
        while self._closing or self._muting or self._muted:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), LOOK_SECONDS)
            self._wanted.clear()
            now = self._clock()
            closing: dict[Peer, int | None] = dict(self._closing)
            muting = [peer for peer in self._muting if peer not in closing]
            self._closing.clear()
            self._muting.clear()
            while self._muted:
                peer, (since, inode) = next(iter(self._muted.items()))
                if len(self._muted) + len(muting) <= MAX_MUTED and now - since < MUTED_SECONDS:
                    break
                del self._muted[peer]
                closing.setdefault(peer, inode)
            known = list(self._connections.items())
            sockets = await asyncio.to_thread(self._end_connections, closing, muting)
            self._muted |= {peer: (now, sockets[peer]) for peer in muting if peer in sockets}
            self._forget_gone(known, sockets)
            await asyncio.sleep(SWEEP_SECONDS)

    def _forget_gone(self, known: Sequence[tuple[str, CallerConnection]], sockets: Mapping[Peer, int]) -> None:
        """Forget closed connections, given the connections known before the scan of the open `sockets`. Another
        caller's connection may reuse the port, and must inherit neither trust nor debt."""
        for name, connection in known:
            inode = sockets.get(connection.peer)
            if inode is not None and connection.inode in (None, inode):
                connection.inode = inode
            elif not connection.calls and self._connections.get(name) is connection:
                del self._connections[name]
        for peer, (_, inode) in list(self._muted.items()):
            if sockets.get(peer) != inode:
                del self._muted[peer]
