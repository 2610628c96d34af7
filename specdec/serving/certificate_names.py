"""Which clients may call: those whose certificates are for certain names."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.serving.callers.certificate import Name, names_of
from specdec.serving.echo import echo
from specdec.serving.errors import PermissionDeniedError
from specdec.serving.interceptor import Context

MAX_ECHOED = 4
"""Names of a certificate that a refusal repeats."""


class CertificateNames:
    """A gate for calls of clients whose certificates are for any of these names. An authority may vouch for more pods
    than are meant to call."""

    def __init__(self, names: Iterable[Name]) -> None:
        self._names = frozenset(names)

    def __call__(self, context: Context) -> None:
        names = names_of(context.auth_context())
        if self._names.isdisjoint(names):
            found = ", ".join(echo(str(name)) for name in sorted(names)[:MAX_ECHOED])
            raise PermissionDeniedError(
                f"the client's certificate is for {found or 'no host, address or URI'}, which may not call",
                "WRONG_CERTIFICATE",
            )
