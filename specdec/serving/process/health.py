"""Health checks (grpc.health.v1), proof against slow readers.

grpcio-health-checking's servicer writes to watchers while holding a lock that every status change needs: one watcher
that does not read would freeze the status, and the drain with it. This servicer only answers `Check`; `Watch` is
UNIMPLEMENTED, a sign for clients not to watch.
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
"""Service name for liveness checks: always SERVING, answered by the event loop that serves everything else, so that a
stuck one does not answer."""

HEALTH_SECONDS = 0.25
"""Seconds between checks of whether the service works."""


class Judged(Protocol):
    """The part of a service that health checks read."""

    name: str
    """Full name of the gRPC service."""

    @property
    def works(self) -> bool:
        """True while it can serve requests."""

    @property
    def needs(self) -> Mapping[str, bool]:
        """Full names of the other services it needs, and whether it reaches one of each now."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers health checks of services by full name, and of the process by the empty name."""

    def __init__(self) -> None:
        self._serves: dict[str, bool] = {}
        self._draining = False

    def report(self, serves: Mapping[str, bool]) -> None:
        """Set which services are serving."""
        self._serves |= serves

    def drain(self) -> None:
        """Report all services as NOT_SERVING from now on."""
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
        await context.abort(grpc.StatusCode.UNIMPLEMENTED, "health can only be checked, not watched")


async def report_health(service: Judged, checks: HealthServicer) -> None:
    """Keep the health statuses up to date: of the service, the process, and the services it needs."""
    worked = False
    while True:
        works = service.works
        checks.report({service.name: works, "": works, **service.needs})
        if worked and not works:  # at start-up the service itself logs what is missing
            log.error("not_serving", service=service.name)
        worked = works
        await asyncio.sleep(HEALTH_SECONDS)
