"""The orchestrators behind the HTTP server: does one of them take requests, and are connections to them still good?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import AsyncClient
from specdec.client.address import may_be_several
from specdec.client.endpoint import ROUND_ROBIN
from specdec.client.tls_files import TlsFiles, channel_credentials
from specdec.serving.process.server import PEER_OPTIONS
from specdec.serving.watched import Watched

log = structlog.get_logger()

KNOWN_SECONDS = 0.5
"""Seconds for which an answer is not asked again, however many ask."""

LOOK_SECONDS = 2.0
"""Seconds between two looks at whether there should be other connections."""

SILENT_SECONDS = 5.0
"""Seconds without any answer after which connections to names are made anew: gRPC asks again for a name that had no
record only after up to two minutes."""


ANSWER_SECONDS = 1.0
"""Seconds after which a check that is not answered counts as failed."""

CHECKS = 4
"""Checks at a time of an address that may stand for several orchestrators, which take turns."""

OWN_CONNECTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""Option of channels that share no connection with others of the process. An orchestrator takes a bounded number of
calls on a connection, and gRPC opens a bounded number of them: completions must not delay control calls."""

SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that no orchestrator gives."""


class Orchestrators:
    """The orchestrators that this server asks. Made in its event loop."""

    def __init__(self, targets: Sequence[str], tls: TlsFiles | None = None) -> None:
        """`tls`: the authorities that certificates of orchestrators must be of, and our own certificate; TlsError if
        they cannot be used. None: without encryption."""
        self._targets = targets
        self._tls = None if tls is None else Watched(tls)
        self._several = any(map(may_be_several, targets))
        self._current = Channels(targets, self._credentials())
        self._answered = time.monotonic()
        self._known_until = float("-inf")
        self._serve = False
        self._asking = asyncio.Lock()

    def client(self) -> AbstractAsyncContextManager[AsyncClient]:
        """Lend a completion the client by which it goes."""
        return self._current.client()

    def control_client(self) -> AbstractAsyncContextManager[AsyncClient]:
        """Lend the client of control calls: model lists and key checks."""
        return self._current.control_client()

    async def serve(self) -> bool:
        """Return True if one of them takes requests."""
        async with self._asking:
            if time.monotonic() > self._known_until:
                answers = await self._current.answers()
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
        await self._current.close()

    async def _look(self) -> None:
        await self.serve()
        changed = self._tls is not None and self._tls.changed()
        silent = self._several and time.monotonic() - self._answered > SILENT_SECONDS
        if changed or silent:
            old = self._current
            self._current = Channels(self._targets, self._credentials(), old)
            self._answered = time.monotonic()
            await old.leave()

    def _credentials(self) -> grpc.ChannelCredentials | None:
        return None if self._tls is None else channel_credentials(self._tls.contents)


class Channels:
    """The channels by which requests go, and by which health is asked. Made in their event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        before: Channels | None = None,
    ) -> None:
        """`before` are the channels that these replace: an orchestrator that has answered there may come back."""
        options = (*PEER_OPTIONS, ROUND_ROBIN)
        if before is None:
            self._client = AsyncClient(targets, credentials=credentials)
            self._control_client = AsyncClient(targets, credentials=credentials, options=OWN_CONNECTIONS)
        else:
            self._client, self._control_client = (
                each.renewed(credentials) for each in (before._client, before._control_client)
            )
        self._checks = [CHECKS if may_be_several(each) else 1 for each in targets]
        self._channels = [
            grpc.aio.insecure_channel(each, options)
            if credentials is None
            else grpc.aio.secure_channel(each, credentials, options)
            for each in targets
        ]
        self._requests = 0
        self._left = False

    def client(self) -> AbstractAsyncContextManager[AsyncClient]:
        return self._lent(self._client)

    def control_client(self) -> AbstractAsyncContextManager[AsyncClient]:
        return self._lent(self._control_client)

    @asynccontextmanager
    async def _lent(self, client: AsyncClient) -> AsyncIterator[AsyncClient]:
        """Lend a client to a request: it is not closed meanwhile, even if other channels replace it."""
        self._requests += 1
        try:
            yield client
        finally:
            self._requests -= 1
            await self._close_unused()

    async def answers(self) -> list[bool]:
        """Return what orchestrators that answer say: True of each that takes requests. Empty if none answers."""
        often = zip(self._channels, self._checks, strict=True)
        checks = [self._check(channel) for channel, times in often for _ in range(times)]
        return [each for each in await asyncio.gather(*checks) if each is not None]

    async def leave(self) -> None:
        """Close them when the last request is done; there are no further ones."""
        self._left = True
        await self._close_unused()

    async def close(self) -> None:
        await self._client.close()
        await self._control_client.close()
        for each in self._channels:
            await each.close()

    async def _close_unused(self) -> None:
        if self._left and not self._requests:
            await self.close()

    async def _check(self, channel: grpc.aio.Channel) -> bool | None:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError as error:
            return None if error.code() in SILENCE else False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
