"""Closes connections by their peer's address, or mutes them: the kernel then drops the data that arrives. gRPC has no
API for this, but the sockets belong to this process.

Shutting a socket down is enough: gRPC sees the end of the connection, as if the peer had closed it, and frees
everything. A muted connection stays open and costs nothing: its peer waits for answers, as after a network failure.
Resets and the first packets of new connections still pass. These packets end a muted connection whose peer is gone, so
that the next caller with the same port can connect.
"""

from __future__ import annotations

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import stat
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass

DESCRIPTORS = "/proc/self/fd"
"""Linux's list of a process's descriptors; without it, no connection is found."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

Peer = tuple[Address, int]
"""Address and port of the remote end of a connection."""

IPV6_HOST_BITS = 64
"""Bits of an IPv6 address chosen by its owner: a /64 counts as one address."""

MAX_DISCARDS = 16
_discarded = bytearray(1 << 19)
"""Maximum reads to discard data, and their buffer of half a MiB: Linux's default receive buffer holds at most 6 MiB."""

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP_DATA = b"".join(
    struct.pack("HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the byte of a TCP header that has the flags
        (0x45, 0, 1, 0x06),  # go on if it has RST or SYN, else skip one
        (0x06, 0, 0, 0xFFFFFFFF),  # return the number of bytes to keep: all
        (0x06, 0, 0, 0),  # none
    )
)
"""A classic BPF program, run by the kernel for each packet of a socket."""

_PEER = re.compile(r"ipv[46]:(?:\[|%5B)?([^\[\]]+?)(?:\]|%5D)?:(\d+)")


def parse_peer(name: str) -> Peer | None:
    """Parse gRPC's name of a peer, such as "ipv4:10.0.0.7:4711" or "ipv6:%5B::1%5D:4711"; None if it has no IP
    address."""
    found = _PEER.fullmatch(name)
    if found is None:
        return None
    try:
        return _plain(found[1].replace("%25", "%")), int(found[2])
    except ValueError:
        return None


def network_of(address: Address) -> Address:
    """Return the address that stands for a caller's network: an IPv4 address for itself, the first one of a /64 for all
    of its IPv6 addresses."""
    return ipaddress.IPv6Address(int(address) >> IPV6_HOST_BITS << IPV6_HOST_BITS) if address.version == 6 else address


def end_connections(closed: Mapping[Peer, int | None], muted: Collection[Peer] = ()) -> dict[Peer, int]:
    """Close or mute these peers' connections to ports on which this process listens. Return the socket inodes of all
    connections to these ports, by peer. A peer's value in `closed` is the inode that its socket must have; None for
    any.

    A peer alone does not identify a connection. A connection from this process to a pod may have the same remote end,
    and a peer's port may by now belong to another caller's connection.
    """
    try:
        descriptors = [int(name) for name in os.listdir(DESCRIPTORS)]
    except OSError:
        return {}
    listening, found, ours = set[int](), list[_Connection](), set[int]()
    for descriptor in descriptors:
        # A listed descriptor may have been closed since, and its number reused by a duplicate of ours.
        duplicate = None if descriptor in ours else _duplicate(descriptor)
        if duplicate is None:
            continue
        try:
            port = duplicate.getsockname()[1]
            if duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(port)
                duplicate.close()
                continue
            host, peer_port = duplicate.getpeername()[:2]
            connection = _Connection((_plain(host), peer_port), port, os.fstat(duplicate.fileno()).st_ino)
        except (OSError, ValueError):  # not connected
            duplicate.close()
            continue
        found.append(connection)
        if connection.peer in closed or connection.peer in muted:
            connection.socket = duplicate
            ours.add(duplicate.fileno())
        else:
            duplicate.close()
    # Only now are all listening ports known: descriptors come in any order.
    accepted = {connection.peer: connection.inode for connection in found if connection.port in listening}
    for connection in found:
        if connection.socket is None:
            continue
        with connection.socket as duplicate, contextlib.suppress(OSError):
            if connection.port not in listening:
                continue
            inode = closed.get(connection.peer, 0)  # 0 matches no socket
            if inode is None or inode == connection.inode:
                _close(duplicate)
                _discard(duplicate)
            elif connection.peer in muted:
                if not _mute(duplicate):
                    _close(duplicate)
                _discard(duplicate)
    return accepted


@dataclass(slots=True, eq=False)
class _Connection:
    peer: Peer
    port: int  # local
    inode: int
    socket: socket.socket | None = None  # a duplicate, if the connection is to be closed or muted


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not muted
        connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    connection.shutdown(socket.SHUT_RDWR)


def _mute(connection: socket.socket) -> bool:
    """Make the kernel drop the data that the peer sends from now on; return False if it cannot."""
    program = ctypes.create_string_buffer(DROP_DATA)
    try:
        connection.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(DROP_DATA) // 8, ctypes.addressof(program))
        )
    except OSError:
        return False
    return True


def _discard(connection: socket.socket) -> None:
    """Discard received data: gRPC would still read it, and a full buffer holds ten thousand calls."""
    for _ in range(MAX_DISCARDS):
        if not connection.recv_into(_discarded, 0, socket.MSG_DONTWAIT):
            return


def _duplicate(descriptor: int) -> socket.socket | None:
    """Return a duplicate of a TCP socket; None if the descriptor is something else or closed. The duplicate still
    refers to the same connection if gRPC closes the original and its number is reused."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return None
        duplicate = os.dup(descriptor)
    except OSError:
        return None
    try:
        found = socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
        return None
    if found.family in (socket.AF_INET, socket.AF_INET6) and found.type == socket.SOCK_STREAM:
        return found
    found.close()
    return None


def _plain(text: str) -> Address:
    """Parse an address; IPv4-mapped IPv6 becomes IPv4."""
    address = ipaddress.ip_address(text.partition("%")[0])
    return getattr(address, "ipv4_mapped", None) or address
