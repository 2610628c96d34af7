"""Server addresses: parsed once, strictly, and normalised to gRPC's form.

gRPC itself accepts almost any string as a host name and then tries to resolve it forever.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

FORMS = "HOST:PORT, [IPV6]:PORT, dns:NAME:PORT, dns:///NAME:PORT, ipv4:ADDRESS:PORT, ipv6:[ADDRESS]:PORT or unix:PATH"
"""The accepted forms of an address, for error messages."""

MAX_PORT = 65535
MAX_PATH_BYTES = 107  # Linux's limit for a socket's path

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_PATH = re.compile(r"(?!//)[A-Za-z0-9_./~+@=-]+")
"""gRPC would parse other characters as parts of a URL."""
_OTHER_SCHEMES = ("google-c2p", "passthrough", "unix-abstract", "vsock", "xds")
"""gRPC's schemes that are not supported here; any other scheme is recognised by its `://`."""


@dataclass(frozen=True)
class Address:
    """The address of one server or several.

    If the address names its servers, `servers` lists them. Otherwise it is a DNS name with one server per record, and
    `name` is (name, port).
    """

    target: str
    """The address in gRPC's own form."""
    servers: tuple[str, ...] = ()
    """One gRPC target per server."""
    name: tuple[str, int] | None = None

    def __str__(self) -> str:
        return self.target

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse an address; ValueError gives the problem and the accepted forms."""
        try:
            return cls._parse(text)
        except ValueError as error:
            raise ValueError(f"{text!r}: {error}; an address is {FORMS}") from None

    @classmethod
    def _parse(cls, text: str) -> Self:
        scheme, _, rest = text.partition(":")
        match scheme:
            case "dns":
                authority = re.match(r"//([^/]*)/?", rest)
                if authority is not None and authority[1]:
                    raise ValueError(f"the name server {authority[1]!r} cannot be chosen")
                host, port = _host_and_port(rest.removeprefix("///"))
                return cls(f"dns:///{host}:{port}", name=(host.strip("[]"), port))
            case "ipv4" | "ipv6":
                version = int(scheme[-1])
                servers = tuple(_literal(server, version) for server in rest.removeprefix("///").split(","))
                return cls(f"{scheme}:{','.join(servers)}", servers)
            case "unix":
                target = f"unix:{_path(rest)}"
                return cls(target, (target,))
        if "://" in text or (scheme in _OTHER_SCHEMES and not re.fullmatch(r"[0-9]{1,5}", rest)):
            raise ValueError(f"the scheme {scheme}: is not supported")
        host, port = _host_and_port(text)
        return cls(f"{host}:{port}", (f"{host}:{port}",))


def parse_addresses(given: str | Sequence[str]) -> list[Address]:
    """Parse comma-separated addresses or a sequence of them, without duplicates; ValueError if one is invalid or there
    are none."""
    texts = [text.strip() for text in (given.split(",") if isinstance(given, str) else given)]
    if not texts:
        raise ValueError(f"no address is given; an address is {FORMS}")
    return list(dict.fromkeys(Address.parse(text) for text in texts))


def may_be_several(target: str) -> bool:
    """Return True if an address's target may mean several servers: a DNS name other than localhost, or several IP
    addresses."""
    scheme, _, rest = target.partition(":")
    if scheme in ("ipv4", "ipv6"):
        return "," in rest
    host = target.removeprefix("dns:///").rpartition(":")[0].strip("[]")
    return scheme != "unix" and host != "localhost" and not (_is_ipv6(host) or host.replace(".", "").isdecimal())


def _host_and_port(text: str) -> tuple[str, int]:
    """Return the host (an IPv6 address with its brackets) and the port."""
    bracketed = re.fullmatch(r"(\[[^\]]*\])(.*)", text)
    if bracketed is not None:
        host, colon, port = bracketed[1], bracketed[2][:1], bracketed[2][1:]
        if colon not in ("", ":"):
            raise ValueError(f"{host} must be followed by a port")
        _check_ip(host[1:-1], 6)
    else:
        host, colon, port = text.rpartition(":") if ":" in text else (text, "", "")
        if ":" in host:
            version6 = _is_ipv6(text) or _is_ipv6(host)
            raise ValueError("an IPv6 address must be in brackets" if version6 else f"{host!r} is not a host name")
        _check_host(host)
    if not port:
        raise ValueError("the port is missing")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= MAX_PORT:
        raise ValueError(f"the port is {port!r}, must be from 1 to {MAX_PORT}")
    return host, int(port)


def _literal(text: str, version: int) -> str:
    """Return the HOST:PORT of an IP address and port."""
    host, port = _host_and_port(text)
    _check_ip(host.strip("[]"), version)
    return f"{host}:{port}"


def _check_ip(text: str, version: int) -> None:
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        found = None
    if found is None or found.version != version or "%" in text:
        raise ValueError(f"{text!r} is not an IPv{version} address")


def _is_ipv6(text: str) -> bool:
    try:
        return ipaddress.ip_address(text).version == 6
    except ValueError:
        return False


def _check_host(host: str) -> None:
    if not host:
        raise ValueError("the host is empty")
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{host!r} is not a host name")
    if labels[-1].isdecimal():  # the last label of a host name cannot be a number
        _check_ip(host, 4)


def _path(text: str) -> str:
    """Return the path of a socket; gRPC also accepts absolute paths with a `//` prefix."""
    path = text[2:] if text.startswith("///") else text
    if not _PATH.fullmatch(path):
        raise ValueError(f"{path!r} is not the path of a socket")
    if len(path) > MAX_PATH_BYTES:
        raise ValueError(f"the path has {len(path)} bytes, must have at most {MAX_PATH_BYTES}")
    return path


def family_of(host: str, port: int) -> socket.AddressFamily:
    """Return the address family of a host: IPv4's if it has addresses of both."""
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    families = {family for family, *_ in found}
    return socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
