"""The Prometheus endpoint: HTTP without TLS, on a separate port."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from socketserver import ThreadingMixIn
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

import structlog
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, make_wsgi_app
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from specdec.wire.address import family_of

log = structlog.get_logger()

COLLECT_SECONDS = 5.0
"""Seconds after which a scrape fails because the service's event loop is stuck."""

REQUEST_SECONDS = 10.0
"""Maximum lifetime of a connection in seconds, even if it is active."""

MAX_CONNECTIONS = 32
"""Maximum number of connections, one thread each; more are closed immediately."""


class ServiceCollector(Collector):
    """Collects a service's metrics on its event loop, which owns them; a stuck loop fails the scrape."""

    def __init__(self, collect: Callable[[], Iterable[Metric]], loop: asyncio.AbstractEventLoop) -> None:
        self._collect = collect
        self._loop = loop

    def collect(self) -> Iterator[Metric]:
        async def collected() -> list[Metric]:
            return list(self._collect())

        collecting = asyncio.run_coroutine_threadsafe(collected(), self._loop)
        try:
            yield from collecting.result(COLLECT_SECONDS)
        except TimeoutError:
            collecting.cancel()
            raise

    def describe(self) -> Iterator[Metric]:
        """Return no metrics: the registry would otherwise collect them at registration, blocking the event loop that it
        waits for."""
        return iter(())


class LoopCollector(Collector):
    """Collects a service's metrics for a scrape answered on its event loop."""

    def __init__(self, collect: Callable[[], Iterable[Metric]]) -> None:
        self._collect = collect

    def collect(self) -> Iterator[Metric]:
        yield from self._collect()

    def describe(self) -> Iterator[Metric]:
        return iter(())


def registry_with(collector: Collector) -> CollectorRegistry:
    """Return a registry of a service's metrics and those of its process."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    registry.register(collector)
    return registry


class MetricsEndpoint:
    """An HTTP server with its own threads that serves metrics. Create it on the service's event loop."""

    def __init__(self, host: str, port: int, collect: Callable[[], Iterable[Metric]]) -> None:
        """Start serving; OSError if the port is unavailable."""
        registry = registry_with(ServiceCollector(collect, asyncio.get_running_loop()))
        self._server = _Server(host, port)
        self._server.set_app(_refusing_when_stuck(make_wsgi_app(registry)))
        self.port: int = self._server.server_port
        threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True).start()

    async def close(self) -> None:
        """Stop the server. Runs on the event loop without blocking it: a scrape in flight may need it."""
        await asyncio.to_thread(self._server.shutdown)
        self._server.server_close()


class _Handler(WSGIRequestHandler):
    """Handles a connection without logging requests."""

    def setup(self) -> None:
        super().setup()
        self._over = threading.Timer(REQUEST_SECONDS, self._hang_up)
        self._over.daemon = True
        self._over.start()

    def finish(self) -> None:
        self._over.cancel()
        super().finish()

    def _hang_up(self) -> None:
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: object) -> None:
        pass


class _Server(ThreadingMixIn, WSGIServer):
    """A server that tolerates any input: its port has no TLS, and anyone in the network may connect."""

    daemon_threads = True
    request_queue_size = MAX_CONNECTIONS
    """Connections that may wait to be accepted. With the default of 5, the system drops the others of a burst, and they
    are retried after a second."""

    def __init__(self, host: str, port: int) -> None:
        self.address_family = family_of(host, port)
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        super().__init__((host, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._places.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log at debug level: a broken connection or bad request is the caller's problem."""
        log.debug("scrape_broken", why=repr(sys.exc_info()[1]))


def _refusing_when_stuck(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Return a WSGI application that answers 503 while the service's event loop is stuck."""

    def answer_or_refuse(environ: Any, start_response: Any) -> Any:
        try:
            return answer(environ, start_response)
        except TimeoutError:
            start_response("503 Service Unavailable", [("Content-Type", "text/plain")])
            return [b"the service's event loop is stuck\n"]

    return answer_or_refuse
