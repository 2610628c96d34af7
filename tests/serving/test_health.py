"""What health checks are told follows what the service can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
from grpc_health.v1 import health, health_pb2
from prometheus_client.metrics_core import Metric

from specdec.serving.process.server import NOT_SERVING, SERVING, report_health
from specdec.serving.timeline import Timelines


class Service:
    """One that works, or does not."""

    name = "a.Service"
    max_request_bytes = 1
    connection_seconds = None
    gates = ()
    works = True

    def __init__(self) -> None:
        self.needs: dict[str, bool] = {}
        self.timelines = Timelines()

    def metrics(self) -> list[Metric]:
        return []

    def register(self, server: grpc.aio.Server) -> None: ...

    async def close(self) -> None: ...


@asynccontextmanager
async def reported(service: Service) -> AsyncIterator[Callable[..., Awaitable[None]]]:
    """Health checks of a service; what is yielded waits until those of these names have a status."""
    checks = health.aio.HealthServicer()
    reporting = asyncio.create_task(report_health(service, checks))

    async def until(status: int, *names: str) -> None:
        async with asyncio.timeout(10):
            for name in names or (service.name, ""):
                request = health_pb2.HealthCheckRequest(service=name)
                while True:
                    try:
                        if (await checks.Check(request, Context())).status == status:
                            break
                    except LookupError:  # not known yet
                        pass
                    await asyncio.sleep(0.01)

    yield until
    reporting.cancel()
    await asyncio.wait([reporting])


async def test_a_service_that_does_not_work_is_not_serving() -> None:
    service = Service()
    async with reported(service) as until:
        await until(SERVING)
        service.works = False
        await until(NOT_SERVING)
        service.works = True
        await until(SERVING)


async def test_what_a_service_needs_is_told_under_the_names_of_these_services() -> None:
    service = Service()
    service.needs = {"another.Service": False}
    async with reported(service) as until:
        await until(NOT_SERVING, "another.Service")
        await until(SERVING)
        service.needs = {"another.Service": True}
        await until(SERVING, "another.Service")


class Context:
    """Raises what a call would be ended with."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise LookupError(details)
