"""Health checks report what the service can do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from prometheus_client.metrics_core import Metric

from specdec.serving.interceptor import CallInterceptor
from specdec.serving.process.health import (
    LIVE,
    MAX_WATCHES_OF_CONNECTION,
    NOT_SERVING,
    SERVING,
    UNKNOWN,
    HealthServicer,
    report_health,
)
from specdec.serving.timeline import Timelines


class Service:
    """A service with an adjustable health."""

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
    """Yield a function that waits until health checks of a service report a status for these names."""
    checks = HealthServicer()
    reporting = asyncio.create_task(report_health(service, checks))

    context: Any = Context()

    async def until(status: int, *names: str) -> None:
        async with asyncio.timeout(10):
            for name in names or (service.name, ""):
                request = health_pb2.HealthCheckRequest(service=name)
                while True:
                    try:
                        if (await checks.Check(request, context)).status == status:
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


async def test_it_lives_while_its_event_loop_runs_whatever_else() -> None:
    service = Service()
    service.works = False
    async with reported(service) as until:
        await until(SERVING, LIVE)


async def test_what_a_service_needs_is_told_under_the_names_of_these_services() -> None:
    service = Service()
    service.needs = {"another.Service": False}
    async with reported(service) as until:
        await until(NOT_SERVING, "another.Service")
        await until(SERVING)
        service.needs = {"another.Service": True}
        await until(SERVING, "another.Service")


class Context:
    """Raises instead of ending the call."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> None:
        raise LookupError(details)


@asynccontextmanager
async def asked(checks: HealthServicer) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """Yield a stub of a server with these health checks."""
    server = grpc.aio.server(interceptors=[CallInterceptor()])
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield health_pb2_grpc.HealthStub(channel)
    await server.stop(None)


async def test_a_drain_is_told_whatever_is_reported_then() -> None:
    checks = HealthServicer()
    checks.report({"a.Service": True})
    async with asked(checks) as stub:
        request = health_pb2.HealthCheckRequest(service="a.Service")
        assert (await stub.Check(request, timeout=10)).status == SERVING
        checks.drain()
        checks.report({"a.Service": True})
        assert (await stub.Check(request, timeout=10)).status == NOT_SERVING


async def test_what_cannot_be_answered_has_a_status() -> None:
    async with asked(HealthServicer()) as stub:
        request = health_pb2.HealthCheckRequest(service="nobody")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Check(request, timeout=10)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_gets_every_change_until_the_drain() -> None:
    """The drain ends the watcher's call, for which it would otherwise wait."""
    checks = HealthServicer()
    async with asked(checks) as stub, asyncio.timeout(10):
        watching = stub.Watch(health_pb2.HealthCheckRequest(service="a.Service"))
        assert (await watching.read()).status == UNKNOWN
        for serves in (True, False):
            checks.report({"a.Service": serves})
            checks.report({"a.Service": serves})  # no change
            assert (await watching.read()).status == (SERVING if serves else NOT_SERVING)
        alive = stub.Watch(health_pb2.HealthCheckRequest(service=LIVE))
        assert (await alive.read()).status == SERVING
        checks.report({"a.Service": True})
        assert (await watching.read()).status == SERVING
        checks.drain()
        assert (await watching.read()).status == NOT_SERVING
        for call in (watching, alive):
            assert await call.code() is grpc.StatusCode.OK


async def test_watchers_are_few_and_end_after_a_while() -> None:
    checks = HealthServicer(watch_seconds=0.2)
    request = health_pb2.HealthCheckRequest()
    checks.report({"": True})
    async with asked(checks) as stub, asyncio.timeout(10):
        watching = [stub.Watch(request) for _ in range(MAX_WATCHES_OF_CONNECTION)]
        for call in watching:
            assert (await call.read()).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await stub.Watch(request).read()
        assert raised.value.code() is grpc.StatusCode.UNIMPLEMENTED
        for call in watching:
            assert await call.code() is grpc.StatusCode.OK
        assert (await stub.Watch(request).read()).status == SERVING
