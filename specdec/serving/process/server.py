"""The life of a service process: load, serve, drain, exit.

The port opens when the service is ready, so that nothing is sent to a pod that still loads.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client.metrics_core import Metric

from specdec.client.address import Address
from specdec.client.tls_files import TlsError, TlsFiles
from specdec.extras import NEEDED, needed_by
from specdec.serving.callers.certificate import Name
from specdec.serving.callers.guard import ConnectionGuard
from specdec.serving.certificate_names import CertificateNames
from specdec.serving.interceptor import CallInterceptor, Gate
from specdec.serving.metrics.endpoint import MetricsEndpoint
from specdec.serving.metrics.families import Families
from specdec.serving.mux.servicer import MuxServicer
from specdec.serving.process import logs
from specdec.serving.process.health import HealthServicer, report_health
from specdec.serving.process.listening import ListenError, bound
from specdec.serving.process.log_stream import guard_stderr
from specdec.serving.timeline import Timelines
from specdec.serving.tls import server_credentials
from specdec.serving.tracing.servicer import TraceServicer
from specdec.serving.validation import MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES
from specdec.settings import settings as started_with
from specdec.v2 import mux_pb2_grpc

if TYPE_CHECKING:  # it brings OpenTelemetry
    from specdec.serving.tracing.spans import SpanExporter

log = structlog.get_logger()

PEER_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 30_000),
)
"""Options of channels to other services. A service that comes back is found within a second, not gRPC's two minutes,
and a connection that leads nowhere is not kept for TCP's quarter of an hour."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

MAX_STREAMS = 100
"""Calls that a connection may have open, which RFC 9113 wants to be no fewer. All of them may wait for the event loop,
at a sixth of a millisecond each: that is how long one connection holds up the others before it is closed. Our clients
open further connections for more calls (`specdec/client/endpoint.py`)."""

MAX_PENDING, MAX_PENDING_HARD = 8192, 16384
"""Calls of a method that may wait for the event loop: beyond the first, gRPC refuses some with CANCELLED, beyond the
second all, good ones among them. gRPC's 1,000 would be used up by ten connections."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_HARD),
    # A connection that says nothing, or does not follow the protocol, is kept for gRPC's two minutes otherwise.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    # One without calls is kept for ever otherwise; a client opens another without anybody noticing.
    ("grpc.max_connection_idle_ms", 300_000),
    # Clients ask every 20 s whether the server is still there: by default gRPC would end their connections.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A caller that is frozen, or gone without a word, must not hold memory and places for gRPC's two hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

OPEN_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
"""Services that answer anybody, with a key or without."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StartError(Exception):
    """The service cannot start; the message is one line for a person."""


class Servicer(Protocol):
    """The implementation of one gRPC service."""

    name: str
    """Full name of the gRPC service."""

    def register(self, server: grpc.aio.Server) -> None: ...

    async def close(self) -> None:
        """Free what it holds; called after the last call has ended."""


class Service(Servicer, Protocol):
    """A servicer that a process serves."""

    @property
    def max_request_bytes(self) -> int:
        """Bytes of a valid request at most, where a call has a single one."""

    @property
    def connection_seconds(self) -> float | None:
        """Seconds after which a client's connection takes no more calls: the client looks for servers then, and finds
        new ones. None: it is used for ever."""

    @property
    def gates(self) -> Sequence[Gate]:
        """What calls have to pass."""

    def metrics(self) -> Iterable[Metric]:
        """Return its metrics for Prometheus. Called in the event loop."""

    timelines: Timelines
    """What it has recorded of requests."""

    @property
    def works(self) -> bool:
        """True while it can serve requests; else the process is NOT_SERVING."""

    @property
    def needs(self) -> Mapping[str, bool]:
        """Full names of the other services that it needs, and whether it reaches one of each now: health checks are
        told so under these names."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server: where and how it listens."""

    host: str = "127.0.0.1"
    port: int = 0
    drain_seconds: float = 30.0
    log_level: str = "info"
    stop_with_stdin: bool = False  # end when stdin closes: how a child follows its parent
    share_port: bool = False  # with other processes that share it too, by SO_REUSEPORT
    tls: TlsFiles | None = None  # None: without encryption
    tls_client_names: tuple[Name, ...] = ()  # that clients' certificates must have one of; none: any
    reflection: bool = False  # tell anybody which services and messages there are
    health_port: int | None = None  # of a server that answers health checks alone, without encryption
    metrics_port: int | None = None  # of a server that answers Prometheus
    otlp_endpoint: Address | None = None  # of the collector that takes traces; None: they are not sent
    trace_ratio: float = 1.0  # share of traces that are sent


async def serve(settings: ServerSettings, load: Callable[[], Awaitable[Service]], service_name: str) -> None:
    """Run a service until SIGINT, SIGTERM or, if asked for, the end of stdin.

    Prints one line `ready HOST:PORT` on stdout when calls can be served.
    """
    logs.configure(service_name, settings.log_level)
    stop = stop_asked_for(settings)

    # 1. If the port is taken, or a certificate cannot be used, no model should be loaded in vain: look first.
    bound(settings.host, settings.port, shared=settings.share_port).close()
    if settings.health_port:
        bound(settings.host, settings.health_port, shared=settings.share_port, option="--health-port").close()
    if settings.metrics_port:
        bound(settings.host, settings.metrics_port, option="--metrics-port").close()
    credentials = None if settings.tls is None else server_credentials(settings.tls)
    exporter = span_exporter(settings, service_name)

    # 2. Load, then take calls.
    loading = asyncio.ensure_future(load())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("stopped_while_loading")
        os._exit(0)  # the loading thread cannot be ended
    service = loading.result()
    if exporter is not None:
        service.timelines.exporter = exporter
    log_settings()  # a start that fails tells its reason alone
    options = [*SERVER_OPTIONS, ("grpc.so_reuseport", int(settings.share_port))]
    if service.connection_seconds is not None:  # calls that run go on, for as long as they like
        options.append(("grpc.max_connection_age_ms", int(1e3 * service.connection_seconds)))
    guard = ConnectionGuard()
    interceptor = CallInterceptor(
        lambda: service.max_request_bytes,
        service.gates,
        [CertificateNames(settings.tls_client_names)] if settings.tls_client_names else (),
        OPEN_SERVICES,
        guard,
    )
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    servers = [server]
    mux = registered(service, server)
    checks = HealthServicer()
    reporting = asyncio.create_task(report_health(service, checks))
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if settings.reflection:
        told = (service.name, TraceServicer.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(told, server)
    port = listen(server, settings.host, settings.port, credentials)
    if settings.health_port is not None:
        servers.append(
            probed := grpc.aio.server(interceptors=[CallInterceptor(open_services=OPEN_SERVICES)], options=options)
        )
        health_pb2_grpc.add_HealthServicer_to_server(checks, probed)
        health_port = listen(probed, settings.host, settings.health_port, None, "--health-port")
        log.info("answering_health_checks", address=f"{settings.host}:{health_port}")
    endpoint = serve_metrics(settings, lambda: all_metrics(service, mux, service_name))
    gc.freeze()  # what is loaded stays: to scan it would cost each garbage collection a tenth of a second
    for each in servers:
        await each.start()
    announce(f"{settings.host}:{port}")
    log.info("serving", address=f"{settings.host}:{port}")
    await stopping

    # 3. Drain: refuse new calls, give running ones their time, cancel the rest.
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)  # a second one ends the process at once
    reporting.cancel()
    checks.drain()
    log.info("draining", seconds=settings.drain_seconds)
    mux.drain()
    await server.stop(settings.drain_seconds)
    for each in servers[1:]:  # probes see the drain to its end
        await each.stop(None)
    if endpoint is not None:
        await endpoint.close()
    await service.close()
    if exporter is not None:
        await exporter.close()
    log.info("stopped")


def listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, option: str = "--port"
) -> int:
    """Have a server listen, with TLS if there are credentials; return the port. ListenError if it cannot."""
    address = f"{host}:{port}"
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # gRPC does not say why; a moment ago it could be had.
        raise ListenError.of(host, port, OSError(errno.EADDRINUSE, ""), option) from error


def all_metrics(service: Service, mux: MuxServicer, role: str) -> list[Metric]:
    """Return the metrics of a service and, if it has sessions, of their messages."""
    found = Families(role)
    if mux.has_streams:
        found.traffic(mux.traffic)
    return [*service.metrics(), *found.made]


def serve_metrics(settings: ServerSettings, collect: Callable[[], Iterable[Metric]]) -> MetricsEndpoint | None:
    """Serve metrics, if there is a port for them; ListenError if it cannot be had."""
    if settings.metrics_port is None:
        return None
    try:
        endpoint = MetricsEndpoint(settings.host, settings.metrics_port, collect)
    except OSError as error:
        raise ListenError.of(settings.host, settings.metrics_port, error, "--metrics-port") from error
    log.info("serving_metrics", address=f"{settings.host}:{endpoint.port}")
    return endpoint


def span_exporter(settings: ServerSettings, service_name: str) -> SpanExporter | None:
    """Return what sends traces, if they are to be sent; ModuleNotFoundError without the extra `otel`."""
    if settings.otlp_endpoint is None:
        return None
    from specdec.serving.tracing.spans import SpanExporter  # it brings OpenTelemetry

    return SpanExporter(service_name, settings.otlp_endpoint.target, settings.trace_ratio)


def log_settings() -> None:
    """Log the settings that the service was started with, if a command did, and where they come from."""
    if (found := started_with()) is None:
        return
    log.info("settings", values={name: _plain(each) for name, each in found.values.items()}, sources=found.sources)
    if found.unknown:
        log.warning("unknown_settings", variables=found.unknown)


def _plain(value: object) -> object:
    """Return a setting as JSON has it."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def announce(address: str) -> None:
    """Print on stdout that calls can be served. If that fails, the service serves all the same."""
    try:
        print(f"ready {address}", flush=True)
    except OSError as error:
        log.warning("not_announced", address=address, why=str(error))


def registered(service: Servicer, server: grpc.aio.Server) -> MuxServicer:
    """Have a server serve a service's methods, each stream by itself or many on one multiplexed connection; return the
    servicer of these connections."""
    mux = MuxServicer()
    service.register(server)
    service.register(cast("grpc.aio.Server", mux))
    if mux.has_streams:
        mux_pb2_grpc.add_MuxServiceServicer_to_server(mux, server)
    return mux


async def in_a_thread_of_its_own(load: Callable[[], Service]) -> Service:
    """Load a model in a thread that ends when it is loaded.

    OpenMP keeps a team of threads for every thread that has computed, for as long as that lives, and lets none of them
    spin once they are more than the cores. So the thread that steps must be the only one with a team.
    """
    with ThreadPoolExecutor(1, "load") as thread:
        return await asyncio.wrap_future(thread.submit(load))


def stop_asked_for(settings: ServerSettings) -> asyncio.Event:
    """Return an event that is set by SIGINT, SIGTERM or, if asked for, the end of stdin."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    if settings.stop_with_stdin:
        try:
            loop.add_reader(sys.stdin, _on_stdin, stop)
        except (OSError, ValueError):  # a file or /dev/null, which never closes later than now
            raise StartError(
                "--stop-with-stdin: stdin is neither a pipe nor a terminal: its end cannot be seen"
            ) from None
    return stop


def _on_stdin(stop: asyncio.Event) -> None:
    if not os.read(sys.stdin.fileno(), 4096):
        asyncio.get_running_loop().remove_reader(sys.stdin)
        stop.set()


def run(settings: ServerSettings, load: Callable[[], Awaitable[Service]], service_name: str) -> None:
    """Run `serve` as a program."""
    run_program(serve(settings, load, service_name), service_name)


def run_program(program: Coroutine[None, None, None], service_name: str) -> None:
    """Run a program. A start that fails ends it with one line on stderr and exit status 1."""
    from specdec.engine.engine import UnsupportedModelError
    from specdec.engine.model_directory import ModelDirectoryError

    guard_stderr()
    try:
        with needed_by(service_name, NEEDED[service_name]):  # engines are imported when they are loaded
            asyncio.run(program)
    except (StartError, ListenError, TlsError, ModelDirectoryError, UnsupportedModelError) as error:
        print(f"{service_name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
