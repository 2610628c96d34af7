"""The life of the server's process: listen, serve, drain, exit."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Sequence
from dataclasses import dataclass

import structlog
from prometheus_client import generate_latest

from specdec.openai_api.app import make_app
from specdec.openai_api.gateway import Gateway
from specdec.openai_api.http_server import HttpServer, ServerTls
from specdec.openai_api.metrics import Counted
from specdec.openai_api.orchestrators import Orchestrators
from specdec.openai_api.response_store import ResponseStore
from specdec.openai_api.routes import ROUTES
from specdec.serving.metrics.endpoint import LoopCollector, registry_with
from specdec.serving.process import logs
from specdec.serving.process.listening import ListenError, bound, is_loopback, joined
from specdec.serving.process.server import (
    STOP_SIGNALS,
    ServerSettings,
    announce,
    log_settings,
    serve_metrics,
    stop_event,
)
from specdec.wire.tls_files import TlsFiles

log = structlog.get_logger()


@dataclass(frozen=True)
class OrchestratorEndpoints:
    """How to reach the orchestrators."""

    targets: Sequence[str]
    tls: TlsFiles | None  # None: no encryption


async def serve(
    settings: ServerSettings,
    endpoints: OrchestratorEndpoints,
    *,
    most_connections: int,
    keep_alive_seconds: int,
    origins: Sequence[str] = (),
    with_page: bool = True,
    store: ResponseStore | None = None,
    strict: bool = False,
    serve_metrics_here: bool | None = None,
) -> None:
    """Run the server until SIGINT, SIGTERM or, if configured, the end of stdin. Prints the line `ready HOST:PORT`.

    `serve_metrics_here`: serve the routes /metrics and the statistics of pods; None: only if the server listens on
    loopback.
    """
    logs.configure("openai", settings.log_level)
    stop = stop_event(settings)
    listener = bound(settings.host, settings.port)
    if settings.metrics_port:
        bound(settings.host, settings.metrics_port, option="--metrics-port").close()
    tls = None if settings.tls is None else ServerTls(settings.tls)
    orchestrators = Orchestrators(endpoints.targets, endpoints.tls)
    gateway = Gateway(orchestrators.client, orchestrators.control_client, orchestrators.key_client)

    def exposed() -> bytes:
        return generate_latest(registry)

    here = is_loopback(settings.host) if serve_metrics_here is None else serve_metrics_here
    routes = make_app(
        gateway,
        orchestrators.serve,
        most_requests=most_connections,
        origins=origins,
        store=store,
        strict=strict,
        with_page=with_page,
        with_stats=here,
        metrics=exposed if here else None,
    )
    app = Counted(routes, ROUTES)
    registry = registry_with(LoopCollector(app.metrics))
    server = HttpServer(
        app,
        listener,
        tls=tls,
        most_connections=most_connections,
        refused=app.refused,
        keep_alive_seconds=keep_alive_seconds,
        drain_seconds=settings.drain_seconds,
    )
    endpoint = serve_metrics(settings, app.metrics)
    try:
        await server.start()
    except OSError as error:
        raise ListenError.of(settings.host, settings.port, error) from error
    orchestrators.start()
    log_settings()
    gc.freeze()  # large bodies cause full collections, which would hold the event loop for 0.1 s
    announce(joined(settings.host, server.port))
    log.info("serving", address=joined(settings.host, server.port))
    await stop.wait()
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)  # a second signal kills the process immediately
    log.info("draining", seconds=settings.drain_seconds)
    await server.stop()
    if endpoint is not None:
        await endpoint.close()
    await orchestrators.close()
    if store is not None:
        store.close()
    log.info("stopped")
