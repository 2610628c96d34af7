"""The names that a caller's certificate is for, each of its kind (RFC 9525).

gRPC's own list of them mixes hosts, addresses, URIs and e-mail addresses, and cuts each at a NUL byte, so that a
certificate for a URI or for "orchestrator.svc\\0.example" would pass as the host's. So the certificate itself is read
here. The subject's common name is no name of a caller.
"""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Any, NamedTuple

from cryptography import x509

PEM = "x509_pem_cert"
"""Key of gRPC's auth context for the certificate that the caller has shown."""

MAX_CERTIFICATES = 1024
"""Certificates whose names are kept: one takes a tenth of a millisecond to read."""

_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_URI = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[!-~]+")


class Name(NamedTuple):
    """A name, spelled in one way."""

    kind: str  # "host", "address" or "URI"
    text: str

    def __str__(self) -> str:
        return self.text


def parse_name(text: str) -> Name:
    """Parse a name as an operator writes it; ValueError if it is none. A wildcard is none: it names no caller."""
    if _URI.fullmatch(text):
        return Name("URI", text)
    try:
        return Name("address", str(ipaddress.ip_address(text)))
    except ValueError:
        pass
    if (host := _host(text)) is None:
        raise ValueError(f"{text!r} is no host name, no address and no URI; wildcards are not supported")
    return host


def names_of(auth_context: Any) -> frozenset[Name]:
    """Return the names of the certificate of gRPC's auth context; none if there is none that can be read."""
    shown = auth_context.get(PEM, ())
    return _names(bytes(shown[0])) if len(shown) == 1 else frozenset()


@lru_cache(MAX_CERTIFICATES)
def _names(pem: bytes) -> frozenset[Name]:
    try:
        certificate = x509.load_pem_x509_certificate(pem)
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound, x509.DuplicateExtension, x509.UnsupportedGeneralNameType):
        return frozenset()
    hosts = [_host(each) for each in names.get_values_for_type(x509.DNSName)]
    addresses = [str(each) for each in names.get_values_for_type(x509.IPAddress)]
    uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    return frozenset(
        [
            *(host for host in hosts if host is not None),
            *(Name("address", address) for address in addresses),
            *(Name("URI", uri) for uri in uris if _URI.fullmatch(uri)),
        ]
    )


def _host(text: str) -> Name | None:
    """Return a host's name, in small letters and without the dot of the root; None if it is none."""
    spelled = text.lower().removesuffix(".")
    return Name("host", spelled) if _HOST.fullmatch(spelled) and len(spelled) <= 253 else None
