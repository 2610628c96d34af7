"""Sessions and connections by client: so many may one of them have open, that one which floods leaves room for the
others.

A client is who its certificate says that it is, whatever connections it opens; without certificates it is the host that
it calls from.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import structlog

from specdec.serving.callers.certificate import names_of
from specdec.serving.errors import OverloadedError

log = structlog.get_logger()

LONGEST_NAME = 200
"""Characters of a client's name that are logged."""


class ClientSessions:
    """Counts of open sessions, or of what else is called `what`. Only the event loop touches them."""

    def __init__(self, most: int | None, what: str = "sessions") -> None:
        """Allow each client so many; None: any number."""
        self._most = most
        self._what = what
        self._open: Counter[str] = Counter()

    @contextmanager
    def session(self, context: grpc.aio.ServicerContext[Any, Any]) -> Iterator[None]:
        """Count a session of the client of a call; OverloadedError if it may have no more."""
        if self._most is None:
            yield
            return
        client = client_of(context)
        if self._open[client] >= self._most:
            # It goes on to whoever asked the orchestrator, who is not to know its certificate.
            log.warning("client_full", client=client[:LONGEST_NAME], what=self._what, limit=self._most)
            raise OverloadedError(f"{self._most} {self._what} are open for one client, the limit is reached")
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]


def client_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    """Return who calls: the names of its certificate, else the host of its address."""
    if names := names_of(context.auth_context()):
        return ", ".join(sorted(map(str, names)))
    peer = context.peer()
    return peer.rpartition(":")[0] if peer.startswith("ipv") else peer
