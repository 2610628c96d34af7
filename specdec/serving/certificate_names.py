"""Which clients may call: those whose certificates are for certain names."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.serving.echo import echo
from specdec.serving.errors import PermissionDeniedError
from specdec.serving.interceptor import Context

ALTERNATIVE_NAME = "x509_subject_alternative_name"
"""Key of gRPC's auth context for the names that a certificate is for: hosts, addresses, URIs (as SPIFFE ids are)."""


class CertificateNames:
    """A gate for calls of clients whose certificates are for any of these names. An authority may vouch for more pods
    than are meant to call."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)

    def __call__(self, context: Context) -> None:
        names = [name.decode(errors="replace") for name in context.auth_context().get(ALTERNATIVE_NAME, ())]
        if self._names.isdisjoint(names):
            found = ", ".join(map(echo, names[:4])) or "no name"
            raise PermissionDeniedError(
                f"the client's certificate is for {found}, which may not call", "WRONG_CERTIFICATE"
            )
