"""A connection that only wastes calls is closed, and its address slowed down; connections of authorized callers are
left alone."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from ipaddress import ip_address
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health, health_pb2_grpc

from specdec.client.endpoint import ROUND_ROBIN
from specdec.serving.callers import guard as guards
from specdec.serving.callers.guard import ConnectionGuard
from specdec.serving.callers.sockets import Peer, end_connections, parse_peer
from specdec.serving.errors import UnauthenticatedError
from specdec.serving.interceptor import CallInterceptor, Metadata
from specdec.serving.process.health import HealthServicer
from specdec.serving.process.server import MAX_STREAMS, OPEN_SERVICES, SERVER_OPTIONS
from tests.captured_logs import captured_logs
from tests.hostile.keyless_grpc import ACK, RawConnection
from tests.hostile.raw_bytes import HELLO, PREFACE, SETTINGS, frame

SERVICE = "tests.Guarded"
ASK, HOLD = f"/{SERVICE}/Ask", f"/{SERVICE}/Hold"
KEY = (("authorization", "Bearer key"),)
PATIENCE = 30.0
ENOUGH = 2 * int(guards.CONNECTION_BURST)
"""Number of calls using up a connection's budget."""


class Guarded:
    """A server requiring a key, with its guard."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.guard = ConnectionGuard(clock=clock)
        self.address = ""
        self.held = 0
        self._changed = asyncio.Event()
        self._release = asyncio.Event()

    @staticmethod
    def check(method: str, metadata: Metadata) -> None:
        if method.startswith(f"/{SERVICE}/") and KEY[0] not in metadata:
            raise UnauthenticatedError("authorization: unknown API key")

    async def ask(self, request: bytes, context: Any) -> bytes:
        return request

    async def hold(self, request: bytes, context: Any) -> bytes:
        self.held += 1
        self._changed.set()
        try:
            await self._release.wait()
        finally:
            self.held -= 1
        return request

    async def until_held(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE):
            while self.held < count:
                self._changed.clear()
                await self._changed.wait()

    def release(self) -> None:
        self._release.set()


@asynccontextmanager
async def guarded(clock: Callable[[], float] = time.monotonic) -> AsyncIterator[Guarded]:
    service = Guarded(clock)
    interceptor = CallInterceptor(gates=[service.check], open_services=OPEN_SERVICES, guard=service.guard)
    server = grpc.aio.server(interceptors=[interceptor], options=SERVER_OPTIONS)
    methods = {
        "Ask": grpc.unary_unary_rpc_method_handler(service.ask, bytes, bytes),
        "Hold": grpc.unary_unary_rpc_method_handler(service.hold, bytes, bytes),
    }
    server.add_registered_method_handlers(SERVICE, methods)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(), server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield service
    finally:
        service.release()
        await server.stop(None)


@asynccontextmanager
async def caller(address: str, *options: tuple[str, int | str]) -> AsyncIterator[Any]:
    """Yield a channel with its own connections."""
    options = (("grpc.use_local_subchannel_pool", 1), *options)
    async with grpc.aio.insecure_channel(address, options=options) as channel:
        yield channel


def asked(channel: Any, method: str = ASK, metadata: Any = KEY) -> Any:
    call = channel.unary_unary(method, bytes, bytes)
    return call(b"?", metadata=metadata, timeout=PATIENCE, wait_for_ready=True)


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("reset", ASK),
        ("whole", ASK),
        ("whole", f"/{SERVICE}/Unknown"),
        ("whole", f"/{health.SERVICE_NAME}/Check"),
    ],
)
async def test_a_connection_that_only_wastes_calls_is_closed(kind: str, path: str) -> None:
    """Meanwhile callers with a key, at the same address, are served on old and on new connections."""
    async with guarded() as service, caller(service.address) as old:
        assert await asked(old) == b"?"
        async with RawConnection(service.address) as attacker:

            async def attack() -> None:
                while not attacker.closed.is_set():
                    attacker.send(kind, ENOUGH, path)
                    await asyncio.sleep(0)

            attacking = asyncio.create_task(attack())
            async with asyncio.timeout(PATIENCE):
                while not attacker.closed.is_set():
                    async with caller(service.address) as new:
                        assert [await asked(new), await asked(old)] == [b"?", b"?"]
            await attacking
            assert await asked(old) == b"?"
    assert service.guard.closed_connections == 1


async def test_resets_by_a_caller_with_a_key_are_closed_too() -> None:
    """Regardless of when a busy machine notices them: time stands still here."""
    async with guarded(clock=lambda: 0.0) as service, RawConnection(service.address) as attacker:
        for _ in range(ENOUGH // MAX_STREAMS):
            attacker.send("reset", MAX_STREAMS, HOLD, key="key")
        await asyncio.wait_for(attacker.closed.wait(), PATIENCE)


async def test_a_connection_with_good_calls_is_left_alone() -> None:
    """A proxy's connection carries calls of all kinds of callers."""
    async with guarded() as service, caller(service.address) as proxy:
        held = asked(proxy, HOLD)
        await service.until_held(1)
        for _ in range(ENOUGH):
            with pytest.raises(grpc.aio.AioRpcError, match="unknown API key"):
                await asked(proxy, metadata=())
        assert service.guard.wasted_calls == ENOUGH
        assert service.guard.closed_connections == 0
        service.release()
        assert await held == b"?"


async def test_a_connection_carries_a_bounded_number_of_calls() -> None:
    async with guarded() as service, RawConnection(service.address) as one:
        one.send("whole", 3 * MAX_STREAMS, HOLD, key="key")
        await service.until_held(1)
        async with caller(service.address) as another:
            assert await asked(another) == b"?"
        assert service.held <= MAX_STREAMS


async def test_our_clients_open_connections_for_more_calls() -> None:
    async with guarded() as service, caller(service.address, ROUND_ROBIN) as channel:
        calls = [asyncio.ensure_future(asked(channel, HOLD)) for _ in range(2 * MAX_STREAMS + 1)]
        await service.until_held(len(calls))
        service.release()
        assert await asyncio.gather(*calls) == [b"?"] * len(calls)


@pytest.mark.parametrize(
    ("limit", "said"),
    [
        ("grpc.server_handshake_timeout_ms", b""),
        ("grpc.server_handshake_timeout_ms", PREFACE),
        ("grpc.http2.settings_timeout", HELLO),
        ("grpc.max_connection_idle_ms", HELLO + frame(SETTINGS, ACK, 0)),
    ],
)
async def test_a_connection_that_makes_no_calls_is_closed(limit: str, said: bytes) -> None:
    """gRPC does so itself, by an option; the test would notice a renamed one."""
    options = [(name, 100 if name == limit else value) for name, value in SERVER_OPTIONS]
    assert options != list(SERVER_OPTIONS)
    server = grpc.aio.server(options=options)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(said)
        with contextlib.suppress(ConnectionError):  # one way a connection ends
            await asyncio.wait_for(reader.read(), PATIENCE)
    finally:
        writer.close()
        await server.stop(None)


async def test_a_refusal_is_answered_before_the_request_is_read() -> None:
    async with guarded() as service, caller(service.address) as channel:
        call = channel.stream_unary(ASK)(timeout=PATIENCE)  # sends no message
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        unknown = channel.unary_unary(f"/{SERVICE}/Unknown")(b"", timeout=PATIENCE)
        assert await unknown.code() is grpc.StatusCode.UNIMPLEMENTED


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Closing:
    """Records closed connections, in place of the sockets. They stay open otherwise, from `ports` of one address."""

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
    """Return the number of calls that a new connection may waste."""
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
        guard.answer_anybody(named(9))
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
    """Callers behind one address get each other's ports, and gRPC names a connection by address and port alone."""
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
    await closing.until(lambda: closing.scans >= scans + 2)
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


@contextmanager
def muted_connection() -> Iterator[tuple[socket.socket, socket.socket, Peer]]:
    """Yield both ends of a muted connection, ours first, and its peer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as peer,
        server.accept()[0] as ours,
    ):
        peer.sendall(b"1")
        assert ours.recv(1) == b"1"
        name = (ip_address("127.0.0.1"), peer.getsockname()[1])
        assert name in end_connections({}, {name})
        yield ours, peer, name


def test_a_muted_connection_hears_nothing_until_it_is_closed() -> None:
    with muted_connection() as (ours, peer, name):
        peer.sendall(b"2")
        ours.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        inode = end_connections({name: 1})[name]  # another socket's: this one stays open
        ours.sendall(b"3")
        assert peer.recv(1) == b"3"
        end_connections({name: inode})
        assert peer.recv(1) == b""


def test_a_muted_connection_ends_with_its_peer() -> None:
    """Its port is free then, and the next caller to get it can connect at once."""
    with muted_connection() as (ours, peer, name):
        peer.sendall(b"2")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets
        server = peer.getpeername()
        peer.close()
        with socket.socket() as another:
            another.bind(("127.0.0.1", name[1]))
            another.settimeout(PATIENCE)
            another.connect(server)
        ours.settimeout(PATIENCE)
        with pytest.raises(ConnectionResetError):
            ours.recv(1)


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


def test_names_of_peers_are_parsed() -> None:
    assert parse_peer("ipv4:10.0.0.7:4711") == (ip_address("10.0.0.7"), 4711)
    assert parse_peer("ipv6:%5B::1%5D:4711") == (ip_address("::1"), 4711)
    assert parse_peer("ipv6:[fe80::1%25eth0]:1") == (ip_address("fe80::1"), 1)
    assert parse_peer("ipv6:%5B::ffff:10.0.0.7%5D:1") == (ip_address("10.0.0.7"), 1)
    assert parse_peer("unix:/run/specdec") is None


def test_only_the_connection_of_that_peer_is_closed() -> None:
    """Other connections to the same address, and those of other peers, stay open; also for IPv4 on an IPv6 socket."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as bad,
            server.accept()[0] as its_end,
            socket.create_connection(("127.0.0.1", port)) as good,
            server.accept()[0] as ends,
            socket.create_server(("127.0.0.1", 0)) as elsewhere,
        ):
            # A local port without a listener is not ours, such as that of an outgoing connection to a pod.
            peers = {(ip_address("127.0.0.1"), end.getsockname()[1]) for end in (bad, good)}
            assert end_connections({(ip_address("127.0.0.1"), port): None}).keys() == peers
            end_connections({(ip_address("127.0.0.1"), bad.getsockname()[1]): None})
            assert bad.recv(1) == b""
            ends.sendall(b"x")
            assert good.recv(1) == b"x"
            assert elsewhere.fileno() >= 0
            with pytest.raises(OSError, match="pipe"):
                its_end.sendall(b"x")
