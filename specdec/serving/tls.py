"""TLS of servers, with certificates and keys reloaded when their files change."""

from __future__ import annotations

import grpc

from specdec.serving.watched import Watched
from specdec.wire.tls_files import TlsError, TlsFiles


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
