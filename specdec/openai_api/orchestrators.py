"""Health of the orchestrators behind the HTTP server: does one of them take requests?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.serving.process.server import PEER_OPTIONS

ANSWER_SECONDS = 1.0
"""Seconds after which a check that is not answered counts as failed."""

KNOWN_SECONDS = 0.5
"""Seconds for which an answer is not asked again, however many ask."""


class Orchestrators:
    """The orchestrators that this server asks. Made in its event loop."""

    def __init__(self, targets: Sequence[str], credentials: grpc.ChannelCredentials | None) -> None:
        self._channels = [
            grpc.aio.insecure_channel(each, PEER_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(each, credentials, PEER_OPTIONS)
            for each in targets
        ]
        self._known_until = float("-inf")
        self._serve = False
        self._asking = asyncio.Lock()

    async def serve(self) -> bool:
        """Return True if one of them takes requests."""
        async with self._asking:
            if time.monotonic() > self._known_until:
                self._serve = any(await asyncio.gather(*map(self._serves, self._channels)))
                self._known_until = time.monotonic() + KNOWN_SECONDS
            return self._serve

    async def close(self) -> None:
        for each in self._channels:
            await each.close()

    async def _serves(self, channel: grpc.aio.Channel) -> bool:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_SECONDS)
        except grpc.RpcError:
            return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
