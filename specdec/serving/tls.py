"""TLS of the services: certificates and keys are read again when their files change.

Whoever renews certificates replaces files, one after the other or all at once: a pair that does not fit together is
left alone until it does.
"""

from __future__ import annotations

import threading

import grpc
import structlog

from specdec.client.tls_files import TlsError, TlsFiles, Version

log = structlog.get_logger()


class Watched:
    """TLS files as last read, and read again when they have changed. May be asked by any thread."""

    def __init__(self, files: TlsFiles) -> None:
        """Read the files; TlsError if they cannot be used."""
        self._files = files
        self._lock = threading.Lock()
        self._refused: Version | None = None
        try:
            self._version = files.version()
        except OSError:
            self._version = ()
        self.contents = files.read()

    def changed(self) -> bool:
        """Look at the files, and return whether there is another set of them to use since the last call. One that
        cannot be used is logged once, and left alone."""
        with self._lock:
            try:
                version = self._files.version()
                if version in (self._version, self._refused):
                    return False
                contents = self._files.read()
                if self._files.version() != version:  # in the middle of being replaced
                    return False
            except OSError:  # a file is gone for a moment
                return False
            except TlsError as error:
                log.warning("tls_files_refused", why=str(error))
                self._refused = version
                return False
            self._version, self.contents = version, contents
            log.info("tls_files_changed", files=[str(each) for each in self._files.all if each is not None])
            return True


def server_credentials(files: TlsFiles) -> grpc.ServerCredentials:
    """Return the credentials of a server that shows the certificate; with `authorities` it takes only clients that show
    a certificate of theirs. TlsError if the files cannot be used now; later changes count for new connections."""
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
        fetch,  # type: ignore[arg-type]  # None keeps what there is
        require_client_authentication=mutual,
    )
