"""Connections are found by their peer, and only these are muted and closed."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

import pytest

from specdec.serving.callers.sockets import Peer, end_connections, parse_peer

PATIENCE = 30.0
# Clients elsewhere on the machine share the ports of 127.0.0.1, so a port there may not be free after its peer's end.
PEER_HOST = "127.29.41.7"


@contextmanager
def muted_connection() -> Iterator[tuple[socket.socket, socket.socket, Peer]]:
    """Yield both ends of a muted connection, ours first, and its peer."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname(), source_address=(PEER_HOST, 0)) as peer,
        server.accept()[0] as ours,
    ):
        peer.sendall(b"1")
        assert ours.recv(1) == b"1"
        name = (ip_address(PEER_HOST), peer.getsockname()[1])
        assert name in end_connections({}, {name})
        yield ours, peer, name


def test_a_muted_connection_hears_nothing_until_it_is_closed() -> None:
    with muted_connection() as (ours, peer, name):
        peer.sendall(b"2")
        ours.settimeout(0.2)
        with pytest.raises(TimeoutError):
            ours.recv(1)
        inode = end_connections({name: 1})[name]  # 1 is another socket's inode: this one stays open
        ours.sendall(b"3")
        assert peer.recv(1) == b"3"
        end_connections({name: inode})
        assert peer.recv(1) == b""


def test_a_muted_connection_ends_with_its_peer() -> None:
    """Its port is then free, and the next caller that gets it can connect immediately."""
    with muted_connection() as (ours, peer, name):
        peer.sendall(b"2")
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # resets
        server = peer.getpeername()
        peer.close()
        with socket.socket() as another:
            another.bind((PEER_HOST, name[1]))
            another.settimeout(PATIENCE)
            another.connect(server)
        ours.settimeout(PATIENCE)
        with pytest.raises(ConnectionResetError):
            ours.recv(1)


def test_names_of_peers_are_parsed() -> None:
    assert parse_peer("ipv4:10.0.0.7:4711") == (ip_address("10.0.0.7"), 4711)
    assert parse_peer("ipv6:%5B::1%5D:4711") == (ip_address("::1"), 4711)
    assert parse_peer("ipv6:[fe80::1%25eth0]:1") == (ip_address("fe80::1"), 1)
    assert parse_peer("ipv6:%5B::ffff:10.0.0.7%5D:1") == (ip_address("10.0.0.7"), 1)
    assert parse_peer("unix:/run/specdec") is None


def test_only_the_connection_of_that_peer_is_closed() -> None:
    """Other connections to the same address and those of other peers stay open, even for IPv4 on an IPv6 socket."""
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server:
        port = server.getsockname()[1]
        with (
            socket.create_connection(("127.0.0.1", port)) as bad,
            server.accept()[0] as its_end,
            socket.create_connection(("127.0.0.1", port)) as good,
            server.accept()[0] as ends,
            socket.create_server(("127.0.0.1", 0)) as elsewhere,
        ):
            # Connections at local ports without a listener are left out, such as outgoing ones to a pod.
            peers = {(ip_address("127.0.0.1"), end.getsockname()[1]) for end in (bad, good)}
            assert end_connections({(ip_address("127.0.0.1"), port): None}).keys() == peers
            end_connections({(ip_address("127.0.0.1"), bad.getsockname()[1]): None})
            assert bad.recv(1) == b""
            ends.sendall(b"x")
            assert good.recv(1) == b"x"
            assert elsewhere.fileno() >= 0
            with pytest.raises(OSError, match="pipe"):
                its_end.sendall(b"x")
