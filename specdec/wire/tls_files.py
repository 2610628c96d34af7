"""PEM files for TLS: reads them, and checks that they belong together."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NamedTuple

import grpc

from specdec.wire.file_version import Version, version_of


class TlsError(Exception):
    """Files cannot be used for TLS; the one-line message names the option and the file."""


class Contents(NamedTuple):
    """The contents of the files; None for a file not given."""

    certificate: bytes | None
    key: bytes | None
    authorities: bytes | None


@dataclass(frozen=True)
class TlsFiles:
    """PEM files of one end: its certificate (with intermediate ones) and key, and the certificate authorities that it
    trusts for the other end. `options` are the names of the three options, for messages."""

    certificate: Path | None
    key: Path | None
    authorities: Path | None
    options: tuple[str, str, str] = ("--tls-cert", "--tls-key", "--tls-client-ca")
    what: ClassVar[str] = "TLS files"
    left_out: ClassVar[str] = ""  # no file is ever skipped
    unusable: ClassVar[type[Exception]] = TlsError

    def version(self) -> Version:
        """Return the current version of the files; OSError if one cannot be found."""
        return version_of(*(file for file in self.all if file is not None))

    def read(self) -> Contents:
        """Read the files. TlsError if one is unreadable or not PEM, if the key is encrypted or belongs to another
        certificate, or if only one of certificate and key is given."""
        cert, key, ca = self.options
        if (self.certificate is None) != (self.key is None):
            there, missing = (key, cert) if self.certificate is None else (cert, key)
            raise TlsError(f"{there} is given, {missing} is missing")
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if self.certificate is not None and self.key is not None:
                _named(cert, self.certificate)
                _named(key, self.key)
                context.load_cert_chain(self.certificate, self.key, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise TlsError(
                f"{cert} {self.certificate}, {key} {self.key}: must be a certificate and its unencrypted key, in PEM "
                f"({_reason(error)})"
            ) from None
        if self.authorities is not None:
            _named(ca, self.authorities)
            try:
                context.load_verify_locations(self.authorities)
            except ssl.SSLError as error:
                raise TlsError(f"{ca} {self.authorities}: contains no PEM certificate ({_reason(error)})") from None
        return Contents(*(None if file is None else file.read_bytes() for file in self.all))

    @property
    def all(self) -> tuple[Path | None, Path | None, Path | None]:
        return self.certificate, self.key, self.authorities


def channel_credentials(contents: Contents) -> grpc.ChannelCredentials:
    """Return the credentials of a channel. Without `authorities`, it trusts gRPC's bundled ones."""
    return grpc.ssl_channel_credentials(contents.authorities, contents.key, contents.certificate)


def _named(option: str, file: Path) -> None:
    """Raise a TlsError that names the file if it cannot be read; ssl's own errors do not."""
    try:
        file.read_bytes()
    except OSError as error:
        raise TlsError(f"{option} {file}: {error.strerror}") from None


def _no_password() -> bytes:
    """Refuse an encrypted key; by default ssl would prompt on the terminal."""
    raise ValueError("the key is encrypted")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)
