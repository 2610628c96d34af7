"""Health checks (grpc.health.v1): what they are told, and that nobody who asks can hold them up.

The servicer of grpcio-health-checking writes to those who watch while it holds a lock that every change needs: one
watcher that does not read would freeze the status, and the drain with it. This one is only asked. Calls of `Watch` are
UNIMPLEMENTED, by which clients know not to watch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

log = structlog.get_logger()

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

LIVE = "live"
"""Name under which checks are told that the process runs: always SERVING, from the event loop that serves all else. One
that stands still does not answer."""

HEALTH_SECONDS = 0.25
"""Seconds between two looks at whether the service works."""


class Judged(Protocol):
    """A service, as far as health checks tell of it."""

    name: str
    """Full name of the gRPC service."""

    @property
    def works(self) -> bool:
        """True while it can serve requests."""

    @property
    def needs(self) -> Mapping[str, bool]:
        """Full names of the other services that it needs, and whether it reaches one of each now."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers health checks of services by their full names; of the process under the empty name."""

    def __init__(self) -> None:
        self._serves: dict[str, bool] = {}
        self._draining = False

    def report(self, serves: Mapping[str, bool]) -> None:
        """Have checks told which services serve."""
        self._serves |= serves

    def drain(self) -> None:
        """Have checks of all services told that they do not serve, from now on."""
        self._draining = True

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        if request.service == LIVE:
            return health_pb2.HealthCheckResponse(status=SERVING)
        serves = self._serves.get(request.service)
        if serves is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=SERVING if serves and not self._draining else NOT_SERVING)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "health can be checked, not watched")


async def report_health(service: Judged, checks: HealthServicer) -> None:
    """Keep the answers to health checks up to date: for the service, for the process, and for what it needs."""
    worked = False
    while True:
        works = service.works
        checks.report({service.name: works, "": works, **service.needs})
        if worked and not works:  # what is missing at first is told by the service
            log.error("not_serving", service=service.name)
        worked = works
        await asyncio.sleep(HEALTH_SECONDS)
