"""Connections to orchestrators, which others may replace while requests run on them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.client import AsyncClient
from specdec.client.address import may_be_several
from specdec.client.endpoint import ROUND_ROBIN
from specdec.serving.process.server import PEER_OPTIONS

ANSWER_SECONDS = 1.0
"""Seconds after which a check that is not answered counts as failed."""

CHECKS = 4
"""Checks at a time of an address that may stand for several orchestrators, which take turns."""

SILENCE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
"""Statuses that no orchestrator gives."""


class Connections:
    """The connections by which requests go, and by which health is asked. Made in their event loop."""

    def __init__(
        self,
        targets: Sequence[str],
        credentials: grpc.ChannelCredentials | None,
        before: Connections | None = None,
    ) -> None:
        """`before` are those that these are to take the place of: who has answered there may come back."""
        options = (*PEER_OPTIONS, ROUND_ROBIN)
        self._client: AsyncClient = (
            AsyncClient(targets, credentials=credentials) if before is None else before._client.renewed(credentials)
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

    @asynccontextmanager
    async def client(self) -> AsyncIterator[AsyncClient]:
        """Lend the client to a request: meanwhile it is not closed because there are other connections."""
        self._requests += 1
        try:
            yield self._client
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
