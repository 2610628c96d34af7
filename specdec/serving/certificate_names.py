"""The gate that admits clients by the names in their certificates."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.serving.callers.certificate import Name, names_of
from specdec.serving.echo import echo
from specdec.serving.errors import PermissionDeniedError
from specdec.serving.interceptor import Context

MAX_ECHOED = 4
"""Maximum number of certificate names in a refusal."""


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
