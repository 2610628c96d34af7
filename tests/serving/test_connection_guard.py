"""The guard's budgets of wasted calls, for a connection and for its address: when a connection is muted or closed, and
when it is trusted. The clock is a fake."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Mapping
from ipaddress import ip_address

import pytest

from specdec.serving.callers import guard as guards
from specdec.serving.callers.guard import ConnectionGuard
from specdec.serving.callers.sockets import Peer
from tests.captured_logs import captured_logs

PATIENCE = 30.0
ENOUGH = 2 * int(guards.CONNECTION_BURST)
"""Number of calls that use up a connection's budget."""


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests set the clock by hand, and then wait for the guard's next scan."""
    monkeypatch.setattr(guards, "LOOK_SECONDS", 0.05)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Closing:
    """Stands for the sockets: records closed and muted connections. The open ones are from `ports` of one address."""

    def __init__(self, ports: Iterable[int] = range(1, 100)) -> None:
        self.closed = set[Peer]()
        self.muted = set[Peer]()
        self.scans = 0
        self.sockets = {(ip_address("10.0.0.7"), port): 1000 + port for port in ports}

    def __call__(self, closed: Mapping[Peer, int | None], muted: Collection[Peer]) -> Mapping[Peer, int]:
        for peer in [peer for peer, inode in closed.items() if inode in (None, self.sockets.get(peer))]:
            self.closed.add(peer)
            self.sockets.pop(peer, None)
        self.muted |= set(muted)
        self.scans += 1
        return dict(self.sockets)

    async def until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not reached():
                await asyncio.sleep(0.01)


def named(number: int, host: str = "10.0.0.7") -> str:
    return f"ipv4:{host}:{number}"


async def wasted_until_closed(guard: ConnectionGuard, peer: str) -> int:
    """Return the number of calls that a new connection may waste before it is closed."""
    before = guard.closed_connections
    for count in range(10 * int(guards.CONNECTION_BURST)):
        guard.refuse(peer, "test")
        if guard.closed_connections > before:
            return count
    raise AssertionError("is never closed")


async def test_an_address_that_opens_many_connections_is_slowed() -> None:
    clock = Clock()
    guard = ConnectionGuard(Closing(), clock)
    allowed = [await wasted_until_closed(guard, named(port)) for port in range(1, 9)]
    assert allowed[:3] == [int(guards.CONNECTION_BURST)] * 3
    assert allowed[-3:] == [guards.MIN_WASTED] * 3
    assert await wasted_until_closed(guard, named(1, "10.0.0.8")) == guards.CONNECTION_BURST  # another address
    clock.now += guards.MAX_DEBT / guards.ADDRESS_RATE + guards.CONNECTION_BURST / guards.ADDRESS_RATE + 1
    assert await wasted_until_closed(guard, named(9)) == guards.CONNECTION_BURST


async def test_connections_of_such_an_address_are_muted_before_they_are_closed() -> None:
    clock, closing = Clock(), Closing()
    guard = ConnectionGuard(closing, clock)
    for port in range(1, 9):
        await wasted_until_closed(guard, named(port))
    last = (ip_address("10.0.0.7"), 8)
    await closing.until(lambda: last in closing.muted)
    assert (ip_address("10.0.0.7"), 1) in closing.closed
    assert last not in closing.closed
    clock.now += guards.MUTED_SECONDS
    await closing.until(lambda: last in closing.closed)


async def test_probes_of_such_an_address_are_not_muted() -> None:
    """A load balancer checks health over a long-lived connection, and may share its address with all callers."""
    guard = ConnectionGuard(Closing(), Clock())
    for port in range(1, 9):
        await wasted_until_closed(guard, named(port))
    before = guard.closed_connections
    for _ in range(int(guards.CONNECTION_BURST)):
        guard.charge_open_call(named(9))
    assert guard.closed_connections == before


async def test_resets_of_callers_with_a_key_mute_nobody() -> None:
    closing = Closing()
    guard = ConnectionGuard(closing, Clock())
    for port in range(1, 10):
        while guard.closed_connections < port:
            guard.reset(guard.begin(named(port)))
    await closing.until(lambda: len(closing.closed) == 9)
    assert not closing.muted


async def test_muted_connections_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MAX_MUTED", 4)
    closing = Closing()
    guard = ConnectionGuard(closing, Clock())
    for port in range(1, 29):
        await wasted_until_closed(guard, named(port))
    await closing.until(lambda: len(closing.closed) == 24)
    assert closing.muted - closing.closed == {(ip_address("10.0.0.7"), port) for port in range(25, 29)}


async def test_the_next_connection_from_a_port_has_neither_trust_nor_debt() -> None:
    """Callers behind one address may get each other's ports, and gRPC names a connection only by address and port."""
    closing = Closing()
    trusted, muted = (ip_address("10.0.0.7"), 50), (ip_address("10.0.0.7"), 8)
    guard = ConnectionGuard(closing, Clock())
    guard.serve(guard.begin(named(50)))
    for port in range(1, 9):
        await wasted_until_closed(guard, named(port))
    await closing.until(lambda: muted in closing.muted)
    for peer in (trusted, muted):
        closing.sockets[peer] += 5000
    scans = closing.scans
    await closing.until(lambda: closing.scans >= scans + 3)  # one may have been under way
    assert await wasted_until_closed(guard, named(50)) == guards.MIN_WASTED
    closing.muted.clear()
    assert await wasted_until_closed(guard, named(8)) == guards.MIN_WASTED
    await closing.until(lambda: {trusted, muted} <= closing.muted)


async def test_the_next_connection_from_a_muted_port_is_not_closed_with_it() -> None:
    clock, closing = Clock(), Closing()
    guard = ConnectionGuard(closing, clock)
    for port in range(1, 9):
        await wasted_until_closed(guard, named(port))
    last = (ip_address("10.0.0.7"), 8)
    await closing.until(lambda: last in closing.muted)
    closing.sockets[last] += 5000
    clock.now += guards.MUTED_SECONDS
    await closing.until(lambda: (ip_address("10.0.0.7"), 7) in closing.closed)
    assert last not in closing.closed


async def test_a_few_wasted_calls_are_not_logged() -> None:
    """Callers cancel occasionally. Many wasted calls are logged, at most every ten seconds."""
    now = 0.0
    guard = ConnectionGuard(Closing(), clock=lambda: now)
    with captured_logs() as lines:
        for number in range(200):
            now += guards.LOG_SECONDS / 40
            guard.refuse(named(number), "UNAUTHENTICATED")
        assert not lines
        now += guards.LOG_SECONDS
        for number in range(guards.LOGGED_CALLS + 10):
            guard.refuse(named(300 + number), "UNAUTHENTICATED")
        assert [line["calls"] for line in lines] == [guards.LOGGED_CALLS]
        now += guards.LOG_SECONDS - 1
        for number in range(guards.LOGGED_CALLS):
            guard.refuse(named(400 + number), "UNAUTHENTICATED")
        assert len(lines) == 1
        now += 1
        guard.refuse(named(500), "UNAUTHENTICATED")
    assert [(line["calls"], line["seconds"]) for line in lines[1:]] == [(guards.LOGGED_CALLS + 11, 10.0)]


async def test_addresses_of_ipv6_are_networks() -> None:
    guard = ConnectionGuard(Closing(), Clock())
    allowed = [await wasted_until_closed(guard, f"ipv6:%5B2001:db8::{host:x}%5D:7") for host in range(1, 9)]
    assert allowed[-1] == guards.MIN_WASTED
    assert await wasted_until_closed(guard, "ipv6:%5B2001:db8:0:1::1%5D:7") == guards.CONNECTION_BURST


async def test_health_checks_and_retries_with_a_wrong_key_are_not_closed() -> None:
    clock = Clock()
    guard = ConnectionGuard(Closing(), clock)
    for _ in range(1000):
        guard.refuse(named(1), "test")
        clock.now += 1 / guards.CONNECTION_RATE
    assert guard.closed_connections == 0


async def test_a_served_call_speaks_for_its_connection_for_a_while() -> None:
    clock = Clock()
    guard = ConnectionGuard(Closing(), clock)
    guard.serve(guard.begin(named(1)))
    for _ in range(ENOUGH):
        guard.refuse(named(1), "test")
    assert guard.closed_connections == 0
    clock.now += guards.TRUSTED_SECONDS
    assert await wasted_until_closed(guard, named(1)) == guards.CONNECTION_BURST


async def test_a_call_that_lasts_may_be_cancelled() -> None:
    clock = Clock()
    guard = ConnectionGuard(Closing(), clock)
    for _ in range(ENOUGH):
        call = guard.begin(named(1))
        clock.now += 2 * guards.EARLY_SECONDS
        guard.reset(call)
    assert guard.wasted_calls == 0


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards, "MAX_CONNECTIONS", 4)
    monkeypatch.setattr(guards, "MAX_ADDRESSES", 4)
    guard = ConnectionGuard(Closing(), Clock())
    lasting = guard.begin(named(1))
    for number in range(100):
        guard.refuse(named(2, f"10.0.1.{number}"), "test")
    assert guard.remembered <= (5, 4)
    guard.refuse(named(1), "test")
    guard.serve(lasting)


async def test_refused_calls_are_counted_by_reason() -> None:
    before = guards.refused_calls.copy()
    guard = ConnectionGuard()
    for _ in range(3):
        guard.refuse(named(1), "UNAUTHENTICATED")
    guard.charge_open_call(named(1))
    assert guards.refused_calls - before == {"UNAUTHENTICATED": 3}
