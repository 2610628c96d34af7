"""Closes connections by their peer's address, or mutes them: the kernel drops what arrives. gRPC has no API for this,
but the sockets are this process's own.

Shutting a socket down is enough: gRPC sees the end of the connection, as if the peer had closed it, and frees
everything. A muted connection stays open at both ends and costs nothing: its peer waits for answers, as after a network
failure.
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
from collections.abc import Collection

DESCRIPTORS = "/proc/self/fd"
"""Linux's list of a process's descriptors; without it no connection is closed."""

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

Peer = tuple[Address, int]
"""Address and port of the remote end of a connection."""

MAX_DISCARDS = 16
_discarded = bytearray(1 << 19)
"""Number and buffer of reads of half a MiB: Linux's default receive buffer holds at most 6 MiB."""

SO_ATTACH_FILTER, SO_DETACH_FILTER = 26, 27
DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A classic BPF program of one instruction: return 0, the number of bytes to keep of a packet."""

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


def close_connections(closed: Collection[Peer], muted: Collection[Peer] = ()) -> int:
    """Close or mute these peers' connections to ports on which this process listens; return their number.

    The peer's address and port alone are not enough: a connection of ours to a pod may have the same remote end.
    """
    try:
        descriptors = [int(name) for name in os.listdir(DESCRIPTORS)]
    except OSError:
        return 0
    listening, found = set[int](), dict[int, socket.socket]()
    for descriptor in descriptors:
        # A listed descriptor may have been closed since, and a duplicate of ours have its number.
        connection = None if descriptor in found else _duplicate(descriptor)
        if connection is None:
            continue
        wanted = False
        try:
            if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                listening.add(connection.getsockname()[1])
            else:
                host, port = connection.getpeername()[:2]
                wanted = (peer := (_plain(host), port)) in closed or peer in muted
        except (OSError, ValueError):  # not connected
            continue
        finally:
            if wanted:
                found[connection.fileno()] = connection
            else:
                connection.close()
    # Only now are all listening ports known: descriptors come in any order.
    done = 0
    for connection in found.values():
        with connection, contextlib.suppress(OSError):
            if connection.getsockname()[1] in listening:
                host, port = connection.getpeername()[:2]
                if (_plain(host), port) in closed or not _mute(connection):
                    _close(connection)
                done += 1
                _discard(connection)
    return done


def _close(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it was not muted
        connection.setsockopt(socket.SOL_SOCKET, SO_DETACH_FILTER, 0)
    connection.shutdown(socket.SHUT_RDWR)


def _mute(connection: socket.socket) -> bool:
    """Make the kernel drop what the peer sends from now on; return False if it cannot."""
    program = ctypes.create_string_buffer(DROP_ALL)
    try:
        connection.setsockopt(
            socket.SOL_SOCKET, SO_ATTACH_FILTER, struct.pack("HL", len(DROP_ALL) // 8, ctypes.addressof(program))
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
    """Return a duplicate of a TCP socket; None if the descriptor is something else or closed. The duplicate stays the
    same connection even if gRPC closes its own and the number is reused."""
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
