"""Listening sockets and their errors.

This module needs only sockets, so that ports can be checked before anything large is loaded.
"""

from __future__ import annotations

import errno
import ipaddress
import itertools
import socket
from collections.abc import Mapping
from contextlib import ExitStack

from specdec.wire.address import family_of


class ListenError(Exception):
    """A service cannot listen; the message is one line with the option and the remedy."""

    @classmethod
    def of(cls, host: str, port: int, error: OSError | UnicodeError, option: str = "--port") -> ListenError:
        """Return the error for an address; `option` is the option that set the port."""
        number = error.errno if isinstance(error, OSError) else None
        if number == errno.EADDRINUSE:
            what = (
                f"another program listens on {joined(host, port)}: stop it, or give another port (0 takes a free one)"
            )
        elif number in (errno.EACCES, errno.EPERM):
            what = f"this user may not listen on {joined(host, port)}: give a port of at least 1024"
        else:
            why = error.strerror if isinstance(error, OSError) else error
            return cls(
                f"{option.removesuffix('port')}host {host}: cannot listen there ({why}): give an address of this "
                "machine, or 0.0.0.0 for all interfaces"
            )
        return cls(f"{option} {port}: {what}")


def joined(host: str, port: int) -> str:
    """Return HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


ANY_HOST = frozenset({"0.0.0.0", "::", ""})
"""Hosts that mean all interfaces."""


def from_here(address: str) -> str:
    """Return the address at which programs on this machine reach a server that listens on HOST:PORT: for all interfaces
    the loopback interface, since no certificate names 0.0.0.0."""
    host, _, port = address.rpartition(":")
    loopback = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
    return f"{loopback.get(host, host)}:{port}"


def check_apart(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Raise ListenError if two services are given the same port. `addresses`: (host, port) by the option that sets the
    port; port 0 means any free one."""
    for (option, (host, port)), (other, (other_host, other_port)) in itertools.combinations(addresses.items(), 2):
        if port and port == other_port and (host == other_host or ANY_HOST & {host, other_host}):
            raise ListenError(f"{option} {port} and {other} {port}: two services cannot share a port, change one")


def check_free(addresses: Mapping[str, tuple[str, int]]) -> None:
    """Raise ListenError, naming all taken ports, unless services can listen on these addresses. `addresses` are as for
    `check_apart`. The ports are not reserved."""
    taken: dict[str, ListenError] = {}
    for option, (host, port) in addresses.items():
        try:
            bound(host, port, option=option).close()
        except ListenError as error:
            if not isinstance(error.__cause__, OSError) or error.__cause__.errno != errno.EADDRINUSE:
                raise
            taken[f"{option} {port}"] = error
    if len(taken) == 1:
        raise next(iter(taken.values()))
    if taken:
        raise ListenError(
            f"{', '.join(taken)}: other programs listen on these ports, perhaps another `specdec up`: stop them, or "
            "give other ports (--port 0 takes free ones for all services)"
        )


def is_loopback(host: str) -> bool:
    """Return True if a server that listens on this address is reachable only from this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def bound(host: str, port: int, *, shared: bool = False, option: str = "--port") -> socket.socket:
    """Return a socket bound to an address but not listening; ListenError if that fails.

    Several processes may bind the same `shared` port (SO_REUSEPORT).
    """
    with ExitStack() as failed:
        try:
            holder = failed.enter_context(socket.socket(family_of(host, port)))
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
            holder.bind((host, port))
        except (OSError, UnicodeError) as error:  # UnicodeError: not a host name
            raise ListenError.of(host, port, error, option) from error
        failed.pop_all()
    return holder
