"""TLS of servers: certificates and keys, reloaded when their files change, and which clients are admitted."""

from __future__ import annotations

from collections.abc import Iterable

import grpc

from specdec.serving.callers.certificate import Name, names_of
from specdec.serving.echo import echo
from specdec.serving.errors import PermissionDeniedError
from specdec.serving.interceptor import Context
from specdec.serving.watched import Watched
from specdec.wire.tls_files import TlsError, TlsFiles

MAX_ECHOED = 4
"""Maximum number of certificate names in a refusal."""


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return server credentials with this certificate. With `authorities`, clients must present a certificate signed by
    one of them. TlsError if the files are unusable now; later changes apply to new connections."""
    watched = Watched(files)
    if files.certificate is None:
        raise TlsError("{2} is given, {0} and {1} are missing".format(*files.options))
    mutual = files.authorities is not None

    def configuration() -> grpc.ServerCertificateConfiguration:
        now = watched.contents
        assert now.key is not None
        assert now.certificate is not None
        return grpc.ssl_server_certificate_configuration([(now.key, now.certificate)], now.authorities)

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        return configuration() if watched.changed() else None

    return grpc.dynamic_ssl_server_credentials(
        configuration(),
        fetch,  # type: ignore[arg-type]  # None keeps the current configuration
        require_client_authentication=mutual,
    )


class CertificateNames:
    """Admits clients whose certificate has any of these names. A valid signature is not enough: the authority may
    also sign certificates of pods that may not call."""

    def __init__(self, names: Iterable[Name]) -> None:
        self._names = frozenset(names)

    def __call__(self, context: Context) -> None:
        names = names_of(context.auth_context())
        if self._names.isdisjoint(names):
            found = ", ".join(echo(str(name)) for name in sorted(names)[:MAX_ECHOED])
            raise PermissionDeniedError(
                f"the client's certificate names {found or 'no host, address or URI'}: not allowed to call",
                "WRONG_CERTIFICATE",
            )
