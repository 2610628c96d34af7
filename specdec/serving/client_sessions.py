"""Per-client limits on sessions and connections, so that one client cannot starve the rest.

A client is identified by the names in its certificate; without one, by its IPv4 address or the /64 of its IPv6 address.
All its connections count together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import structlog

from specdec.serving.callers.certificate import names_of
from specdec.serving.callers.sockets import network_of, parse_peer
from specdec.serving.errors import OverloadedError

log = structlog.get_logger()

MAX_NAME_CHARACTERS = 200
"""Maximum length in characters of a client's name in logs."""


class ClientSessions:
    """Counts open sessions per client; `what` names the things counted, if not sessions. Belongs to the event loop."""

    def __init__(self, most: int | None, what: str = "sessions") -> None:
        """`most` is the limit per client; None: unlimited."""
        self._most = most
        self._what = what
        self._open: Counter[str] = Counter()

    @contextmanager
    def session(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Count a session of the calling client while the context is open; OverloadedError at the client's limit."""
        if self._most is None:
            yield
            return
        client = client_of(context)
        if self._open[client] >= self._most:
            # The error below reaches the orchestrator's own client, which must not see the certificate's names.
            log.warning("client_full", client=client[:MAX_NAME_CHARACTERS], what=self._what, limit=self._most)
            raise OverloadedError(f"{self._most} {self._what} are open for one client, the limit is reached")
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


def client_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return the names in the caller's certificate, or else the caller's network."""
    if names := names_of(context.auth_context()):
        return ", ".join(sorted(map(str, names)))
    found = parse_peer(context.peer())
    return context.peer() if found is None else str(network_of(found[0]))
