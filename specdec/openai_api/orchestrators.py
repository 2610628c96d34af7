"""The orchestrators behind the HTTP server: does one of them take requests, and are connections to them still good?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager

import grpc
import structlog

from specdec.client import AsyncClient
from specdec.client.address import may_be_several
from specdec.client.tls_files import TlsFiles, channel_credentials
from specdec.openai_api.connections import Connections
from specdec.serving.watched import Watched

log = structlog.get_logger()

KNOWN_SECONDS = 0.5
"""Seconds for which an answer is not asked again, however many ask."""

LOOK_SECONDS = 2.0
"""Seconds between two looks at whether there should be other connections."""

SILENT_SECONDS = 5.0
"""Seconds without any answer after which connections to names are made anew: gRPC asks again for a name that had no
record only after up to two minutes."""


class Orchestrators:
    """The orchestrators that this server asks. Made in its event loop."""

    def __init__(self, targets: Sequence[str], tls: TlsFiles | None = None) -> None:
        """`tls`: the authorities that certificates of orchestrators must be of, and our own certificate; TlsError if
        they cannot be used. None: without encryption."""
        self._targets = targets
        self._tls = None if tls is None else Watched(tls)
        self._several = any(map(may_be_several, targets))
        self._connections = Connections(targets, self._credentials())
        self._answered = time.monotonic()
        self._known_until = float("-inf")
        self._serve = False
        self._asking = asyncio.Lock()

    def client(self) -> AbstractAsyncContextManager[AsyncClient]:
        """Lend a request the client by which it goes."""
        return self._connections.client()

    async def serve(self) -> bool:
        """Return True if one of them takes requests."""
        async with self._asking:
            if time.monotonic() > self._known_until:
                answers = await self._connections.answers()
                self._serve = any(answers)
                self._known_until = time.monotonic() + KNOWN_SECONDS
                if answers:
                    self._answered = time.monotonic()
            return self._serve

    async def keep_up_to_date(self) -> None:
        """Make the connections anew when the files of certificates have changed, and while nobody answers at a name.
        Running requests end on those that they have."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
            except Exception:  # whoever stops looking never renews anything again
                log.exception("look_failed")

    async def close(self) -> None:
        await self._connections.close()

    async def _look(self) -> None:
        await self.serve()
        changed = self._tls is not None and self._tls.changed()
        silent = self._several and time.monotonic() - self._answered > SILENT_SECONDS
        if changed or silent:
            old = self._connections
            self._connections = Connections(self._targets, self._credentials(), old)
            self._answered = time.monotonic()
            await old.leave()

    def _credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._tls is None else channel_credentials(self._tls.contents)
