"""The names in a caller's certificate, by kind (RFC 9525).

gRPC's own list mixes hosts, addresses, URIs and e-mail addresses, and truncates each at a NUL byte: a certificate for a
URI or for "orchestrator.svc\\0.example" would pass as one for a host. So this module parses the certificate itself. The
subject's common name is ignored.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any, NamedTuple

from cryptography import x509

PEM = "x509_pem_cert"
"""Key of the caller's certificate in gRPC's auth context."""

MAX_CERTIFICATES = 1024
"""Number of certificates with cached names: parsing one takes 0.1 ms."""

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!-~]+")


class Name(NamedTuple):
    """A name in canonical spelling."""

    kind: str  # "host", "address" or "URI"
    text: str

    def __str__(self) -> str:
        return self.text


def parse_name(text: str) -> Name:
    """Parse a name from an operator; ValueError if it is invalid. Wildcards are invalid: they name no caller."""
    if _URI.fullmatch(text):
        return Name("URI", text)
    try:
        return Name("address", str(ipaddress.ip_address(text)))
    except ValueError:
        pass
    if (host := _host(text)) is None:
        raise ValueError(f"{text!r} is not a host name, IP address or URI; wildcards are not supported")
    return host


def names_of(auth_context: Any) -> frozenset[Name]:
    """Return the names in the certificate of gRPC's auth context; empty if there is no readable one."""
    shown = auth_context.get(PEM, ())
    return _names(bytes(shown[0])) if len(shown) == 1 else frozenset()


@lru_cache(MAX_CERTIFICATES)
def _names(pem: bytes) -> frozenset[Name]:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return frozenset()
    hosts = [_host(name) for name in names.get_values_for_type(x509.DNSName)]
    addresses = [str(address) for address in names.get_values_for_type(x509.IPAddress)]
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return frozenset(
        [
            *(host for host in hosts if host is not None),
            *(Name("address", address) for address in addresses),
            *(Name("URI", uri) for uri in uris if _URI.fullmatch(uri)),
        ]
    )


def _host(text: str) -> Name | None:
    """Return a host name in lower case and without a trailing dot; None if invalid."""
    spelled = text.lower().removesuffix(".")
    return Name("host", spelled) if _HOST.fullmatch(spelled) and len(spelled) <= 253 else None
