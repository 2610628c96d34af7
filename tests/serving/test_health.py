"""What health checks are told follows what the service can do."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health, health_pb2

from specdec.serving.process.server import NOT_SERVING, SERVING, report_health


class Service:
    """One that works, or does not."""

    name = "a.Service"
    max_request_bytes = 1
    works = True

    def register(self, server: grpc.aio.Server) -> None: ...

    async def close(self) -> None: ...


async def test_a_service_that_does_not_work_is_not_serving() -> None:
    service, checks = Service(), health.aio.HealthServicer()
    reporting = asyncio.create_task(report_health(service, checks))

    async def until(status: int) -> None:
        async with asyncio.timeout(10):
            for name in (service.name, ""):
                request = health_pb2.HealthCheckRequest(service=name)
                while True:
                    try:
                        if (await checks.Check(request, Context())).status == status:
                            break
                    except LookupError:  # not known yet
                        pass
                    await asyncio.sleep(0.01)

    await until(SERVING)
    service.works = False
    await until(NOT_SERVING)
    service.works = True
    await until(SERVING)
    reporting.cancel()
    await asyncio.wait([reporting])


class Context:
    """Raises what a call would be ended with."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise LookupError(details)
