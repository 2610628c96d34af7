"""Health checks (grpc.health.v1) that tolerate slow readers.

grpcio-health-checking's servicer writes to watchers while holding a lock that every status change needs: one watcher
that does not read would freeze the status and the drain. Here each watcher waits for the next change on its own, and
gets the status at that moment. Anyone may watch, so watches are limited in number and duration; a client whose watch
has ended starts another. Watches above the limits get UNIMPLEMENTED, which makes clients disable health checking.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol

import grpc
import structlog
from grpc_health.v1 import health_pb2, health_pb2_grpc

log = structlog.get_logger()

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

LIVE = "live"
"""Service name for liveness checks: always SERVING. The event loop that serves everything else answers them, so a stuck
loop does not answer."""

MAX_WATCHES, MAX_WATCHES_OF_CONNECTION = 128, 4
"""Maximum number of watchers, in total and per connection."""

WATCH_SECONDS = 600.0
"""Seconds after which a watcher's call ends."""

HEALTH_SECONDS = 0.25
"""Seconds between checks of whether the service works."""


class Judged(Protocol):
    """The part of a service that health checks read."""

    name: str
    """Full name of the gRPC service."""

    @property
    def works(self) -> bool:
        """True while it can serve requests; otherwise the process is NOT_SERVING."""

    @property
    def needs(self) -> Mapping[str, bool]:
        """Full names of the other services it needs, and whether it currently reaches any instance of each. Health
        checks report them under these names."""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Answers health checks of services by full name, and of the process by the empty name."""

    def __init__(self, watch_seconds: float = WATCH_SECONDS) -> None:
        self._serves: dict[str, bool] = {}
        self._draining = False
        self._changed = asyncio.Event()  # set by the next change, which replaces it
        self._watch_seconds = watch_seconds
        self._watches: Counter[str] = Counter()  # by connection

    def report(self, serves: Mapping[str, bool]) -> None:
        """Set which services are serving."""
        if serves.items() - self._serves.items():
            self._serves |= serves
            self._tell()

    def drain(self) -> None:
        """Report all services as NOT_SERVING from now on, and end the watchers' calls: the drain would wait for
        them."""
        self._draining = True
        self._tell()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse.ServingStatus.ValueType:
        if service == LIVE:
            return SERVING
        serves = self._serves.get(service)
        if serves is None:
            return UNKNOWN
        return SERVING if serves and not self._draining else NOT_SERVING

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Send the status of a service now and after each change; SERVICE_UNKNOWN for an unknown service."""
        peer = context.peer()
        if self._watches.total() >= MAX_WATCHES or self._watches[peer] >= MAX_WATCHES_OF_CONNECTION:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "too many watchers: call Check instead")
        self._watches[peer] += 1
        sent = None
        try:
            async with asyncio.timeout(self._watch_seconds):
                while True:
                    changed, draining = self._changed, self._draining  # either may change during the write
                    if (status := self._status(request.service)) != sent:
                        await context.write(health_pb2.HealthCheckResponse(status=status))
                        sent = status
                    if draining:
                        return
                    await changed.wait()
        except TimeoutError:
            return
        finally:
            self._watches -= Counter({peer: 1})


async def report_health(service: Judged, checks: HealthServicer) -> None:
    """Periodically update the health statuses of the service, the process, and the services it needs."""
    worked = False
    while True:
        try:
            works, needs = service.works, service.needs
        except Exception:  # a bug, which must not freeze the last status
            log.exception("health_unknown", service=service.name)
            works, needs = False, {}
        checks.report({service.name: works, "": works, **needs})
        if worked and not works:  # at start-up the service itself logs what is missing
            log.error("not_serving", service=service.name)
        worked = works
        await asyncio.sleep(HEALTH_SECONDS)
