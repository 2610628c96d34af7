"""The orchestrators behind the HTTP server: their health and their channels."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import AsyncClient
from specdec.client.endpoint import ROUND_ROBIN
from specdec.serving.periodic import Periodic
from specdec.serving.process.server import PEER_OPTIONS
from specdec.serving.watched import Watched
from specdec.wire.address import may_be_several
from specdec.wire.tls_files import TlsFiles, channel_credentials

KNOWN_SECONDS = 0.5
"""Seconds for which a health result is cached."""

LOOK_SECONDS = 2.0
"""Seconds between checks of whether the channels must be renewed."""

SILENT_SECONDS = 5.0
"""Seconds without any answer after which channels to DNS names are recreated: for a name without records, gRPC may take
two minutes to retry."""


ANSWER_SECONDS = 1.0
"""Timeout of a health check in seconds."""

CHECKS = 4
"""Concurrent checks of an address that may resolve to several orchestrators, reached round-robin."""

OWN_CONNECTIONS = (("grpc.use_local_subchannel_pool", 1),)
"""Channel options that prevent channels of this process from sharing connections. An orchestrator limits the calls per
connection: on a shared one, completions would delay control calls."""

SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that mean no answer from an orchestrator."""


class Orchestrators:
    """The orchestrators behind this server. Create it on the server's event loop."""

    def __init__(self, targets: Sequence[str], tls: TlsFiles | None = None) -> None:
        """`tls`: the authorities for orchestrators' certificates, and our own certificate; TlsError if they are
        unusable. None: no encryption."""
        self._targets = targets
        self._tls = None if tls is None else Watched(tls)
        self._several = any(map(may_be_several, targets))
        self._current = Channels(targets, self._credentials())
        self._answered = time.monotonic()
        self._known_until = float("-inf")
        self._serve = False
        self._asking = asyncio.Lock()
        self._looking = Periodic(self._look, LOOK_SECONDS, "look_failed")

    def client(self) -> AbstractAsyncContextManager[AsyncClient]:
        """Lend a client to a completion."""
        return self._current.client()

    def control_client(self) -> AbstractAsyncContextManager[AsyncClient]:
        """Lend a client to a control call of an accepted caller."""
        return self._current.control_client()

    def key_client(self) -> AbstractAsyncContextManager[AsyncClient]:
        """Lend a client with a new connection, for the check of a key."""
        return self._current.key_client()

    async def serve(self) -> bool:
        """Return whether any orchestrator accepts requests."""
        async with self._asking:
            if time.monotonic() > self._known_until:
                answers = await self._current.answers()
                self._serve = any(answers)
                self._known_until = time.monotonic() + KNOWN_SECONDS
                if answers:
                    self._answered = time.monotonic()
            return self._serve

    def start(self) -> None:
        """Start renewing channels."""
        self._looking.start()

    async def close(self) -> None:
        await self._looking.close()
        await self._current.close()

    async def _look(self) -> None:
        """Recreate the channels when certificate files change, and while no orchestrator behind a DNS name answers.
        Running requests finish on their old channels."""
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
    """The channels for requests and for health checks. Create them on their event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        before: Channels | None = None,
    ) -> None:
        """`before`: the channels to replace. Known orchestrators are carried over, since they may return."""
        options = (*PEER_OPTIONS, ROUND_ROBIN)
        self._credentials = credentials
        if before is None:
            self._client = AsyncClient(targets, credentials=credentials)
            self._control_client = AsyncClient(targets, credentials=credentials, options=OWN_CONNECTIONS)
        else:
            self._client, self._control_client = (
                client.renewed(credentials) for client in (before._client, before._control_client)
            )
        self._checks = [CHECKS if may_be_several(target) else 1 for target in targets]
        self._channels = [
            grpc.aio.insecure_channel(target, options)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options)
            for target in targets
        ]
        self._requests = 0
        self._left = False

    def client(self) -> AbstractAsyncContextManager[AsyncClient]:
        return self._lent(self._client)

    def control_client(self) -> AbstractAsyncContextManager[AsyncClient]:
        return self._lent(self._control_client)

    @asynccontextmanager
    async def key_client(self) -> AsyncIterator[AsyncClient]:
        # After many refused calls from an address, orchestrators stop answering its connections that carry only such
        # calls. The first refused call on a connection is always answered.
        async with self._control_client.renewed(self._credentials) as client:
            yield client

    @asynccontextmanager
    async def _lent(self, client: AsyncClient) -> AsyncIterator[AsyncClient]:
        """Lend a client to a request. It stays open for the request, even if the channels are replaced meanwhile."""
        self._requests += 1
        try:
            yield client
        finally:
            self._requests -= 1
            await self._close_unused()

    async def answers(self) -> list[bool]:
        """Return, for each answered check, whether the orchestrator accepts requests; empty if none was answered."""
        often = zip(self._channels, self._checks, strict=True)
        checks = [self._check(channel) for channel, times in often for _ in range(times)]
        return [answer for answer in await asyncio.gather(*checks) if answer is not None]

    async def leave(self) -> None:
        """Close the channels after their last running request; new requests may not start on them."""
        self._left = True
        await self._close_unused()

    async def close(self) -> None:
        await self._client.close()
        await self._control_client.close()
        for channel in self._channels:
            await channel.close()

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
