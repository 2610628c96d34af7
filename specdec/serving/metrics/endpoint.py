"""The endpoint that Prometheus scrapes: HTTP, without TLS, on a port of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, start_http_server
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

COLLECT_SECONDS = 5.0
"""Seconds after which a scrape fails, since the service's event loop does nothing."""


class ServiceCollector(Collector):
    """Collects a service's metrics in its event loop, which owns them; a loop that is stuck fails the scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], loop: asyncio.AbstractEventLoop) -> None:
        self._collect = collect
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        async def collected() -> list[Metric]:
            return list(self._collect())

        yield from asyncio.run_coroutine_threadsafe(collected(), self._loop).result(COLLECT_SECONDS)

    def describe(self) -> Iterator[Metric]:
        """Name no metrics in advance: the registry would collect them, and wait for the loop that is calling it."""
        return iter(())


class MetricsEndpoint:
    """An HTTP server with threads of its own, which answers GET /metrics. Made in the service's event loop."""

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        """Serve from now on; OSError if the port cannot be had."""
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        GCCollector(registry=registry)
        registry.register(ServiceCollector(collect, asyncio.get_running_loop()))
        self._server, self._thread = start_http_server(port, host, registry)
        self.port: int = self._server.server_port

    async def close(self) -> None:
        """End the server. Called in the event loop, which a scrape under way may be waiting for."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()
