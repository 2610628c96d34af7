"""The life of a service process: load, serve, drain, exit.

The port opens once the service is ready, so that a loading pod receives no calls.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import grpc
import structlog
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client.metrics_core import Metric

from specdec.extras import NEEDED, needed_by
from specdec.serving.callers.certificate import Name
from specdec.serving.callers.guard import ConnectionGuard
from specdec.serving.interceptor import CallInterceptor, Gate
from specdec.serving.metrics.endpoint import MetricsEndpoint
from specdec.serving.metrics.families import Families
from specdec.serving.mux.servicer import MuxServicer
from specdec.serving.process import logs
from specdec.serving.process.health import HealthServicer, Judged, report_health
from specdec.serving.process.listening import ListenError, bound, joined
from specdec.serving.process.logs import guard_stderr
from specdec.serving.timeline import Timelines
from specdec.serving.tls import CertificateNames, server_credentials
from specdec.serving.tracing.servicer import TraceServicer
from specdec.serving.validation import MAX_ANSWER_BYTES, MAX_MESSAGE_BYTES
from specdec.settings import settings as started_with
from specdec.v2 import mux_pb2_grpc
from specdec.wire.address import Address
from specdec.wire.tls_files import TlsError, TlsFiles

if TYPE_CHECKING:  # imports OpenTelemetry
    from specdec.serving.tracing.spans import SpanExporter

log = structlog.get_logger()

PEER_OPTIONS = (
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.enable_http_proxy", 0),
)
"""Options of channels to other services. A returning service is found within a second instead of gRPC's two minutes,
and a dead connection is dropped long before TCP's quarter of an hour. Services connect directly: `http_proxy` of the
environment is for the web."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)

MAX_STREAMS = 100
"""Maximum number of concurrent calls on a connection; RFC 9113 recommends at least 100. All of them may wait for the
event loop, at a sixth of a millisecond each: this bounds how long one connection can delay others before it is closed.
Our clients open further connections for more calls (`specdec/client/endpoint.py`)."""

MAX_PENDING, MAX_PENDING_HARD = 8192, 16384
"""Limits on calls of a method that wait for the event loop. Above the first, gRPC refuses some with CANCELLED; above
the second, all, including valid ones. Ten connections would use up gRPC's default of 1,000."""

SERVER_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_ANSWER_BYTES),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_PENDING),
    ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING_HARD),
    # Close silent connections, and ones that violate the protocol; gRPC's default is two minutes.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.http2.settings_timeout", 10_000),
    # Close idle connections; by default they are kept forever. Clients reconnect transparently.
    ("grpc.max_connection_idle_ms", 300_000),
    # Clients ping every 20 s; with its default, gRPC would close their connections for that.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    # A caller that freezes or vanishes must not hold memory and slots for gRPC's two hours.
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.ping_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

OPEN_SERVICES = (health.SERVICE_NAME, reflection.SERVICE_NAME)
"""Services that anyone may call, without an API key."""

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StartError(Exception):
    """The service cannot start; the message is a single line for the operator."""


class Servicer(Protocol):
    """The implementation of one gRPC service."""

    name: str
    """Full name of the gRPC service."""

    def register(self, server: grpc.aio.Server) -> None: ...

    async def close(self) -> None:
        """Free its resources; called after the last call has ended."""


class Service(Servicer, Judged, Protocol):
    """The servicer that a process serves."""

    @property
    def max_request_bytes(self) -> int:
        """Maximum bytes of a valid unary request."""

    @property
    def connection_seconds(self) -> float | None:
        """Seconds after which a client's connection accepts no more calls, so that the client resolves servers again
        and finds new ones. None: unlimited."""

    @property
    def gates(self) -> Sequence[Gate]:
        """Gates that every call must pass."""

    def metrics(self) -> Iterable[Metric]:
        """Return its Prometheus metrics. Called on the event loop."""

    timelines: Timelines
    """Its recorded timelines of requests."""


@dataclass(frozen=True)
class ServerSettings:
    """The settings of a server: where and how it listens."""

    host: str = "127.0.0.1"
    port: int = 0
    drain_seconds: float = 30.0
    log_level: str = "info"
    stop_with_stdin: bool = False  # stop when stdin closes, as it does when a parent process ends
    share_port: bool = False  # by SO_REUSEPORT, with other processes that set it too
    tls: TlsFiles | None = None  # None: no encryption
    tls_client_names: tuple[Name, ...] = ()  # a client's certificate must have one of them; (): any
    reflection: bool = False  # describe services and messages to anyone
    health_port: int | None = None  # of a server for health checks only, without encryption
    metrics_port: int | None = None  # of the Prometheus endpoint
    otlp_endpoint: Address | None = None  # of the OTLP collector; None: no traces are sent
    trace_ratio: float = 1.0  # share of traces sent


async def serve(settings: ServerSettings, load: Callable[[], Awaitable[Service]], service_name: str) -> None:
    """Run a service until SIGINT, SIGTERM or, if configured, the end of stdin.

    Prints the line `ready HOST:PORT` on stdout once it accepts calls.
    """
    logs.configure(service_name, settings.log_level)
    stop = stop_event(settings)

    # 1. Check ports and certificates first, before spending time on a model.
    _check_ports(settings)
    credentials = None if settings.tls is None else server_credentials(settings.tls)
    exporter = span_exporter(settings, service_name)

    # 2. Load, then accept calls.
    loading = asyncio.ensure_future(load())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if not loading.done():
        log.info("stopped_while_loading")
        os._exit(0)  # the loading thread cannot be cancelled
    service = loading.result()
    if exporter is not None:
        service.timelines.exporter = exporter
    log_settings()  # not earlier: a failed start prints only its reason
    checks = HealthServicer()
    servers, mux, port = _servers(settings, service, checks, credentials)
    reporting = asyncio.create_task(report_health(service, checks))
    endpoint = serve_metrics(settings, lambda: all_metrics(service, mux, service_name))
    gc.freeze()  # loaded objects stay: scanning them would cost each collection a tenth of a second
    for server in servers:
        await server.start()
    announce(joined(settings.host, port))
    log.info("serving", address=joined(settings.host, port))
    await stopping

    # 3. Drain: refuse new calls, let running ones finish until the deadline, cancel the rest.
    reporting.cancel()
    await _drain(settings.drain_seconds, servers, mux, checks)
    if endpoint is not None:
        await endpoint.close()
    await service.close()
    if exporter is not None:
        await exporter.close()
    log.info("stopped")


def _check_ports(settings: ServerSettings) -> None:
    """Raise ListenError if a configured port is unavailable."""
    bound(settings.host, settings.port, shared=settings.share_port).close()
    if settings.health_port:
        bound(settings.host, settings.health_port, shared=settings.share_port, option="--health-port").close()
    if settings.metrics_port:
        bound(settings.host, settings.metrics_port, option="--metrics-port").close()


def _servers(
    settings: ServerSettings, service: Service, checks: HealthServicer, credentials: grpc.ServerCredentials | None
) -> tuple[list[grpc.aio.Server], MuxServicer, int]:
    """Return the service's server and, if it has a port, the server for health checks only, with their ports open; the
    servicer of multiplexed connections; and the service's port."""
    options = [*SERVER_OPTIONS, ("grpc.so_reuseport", int(settings.share_port))]
    if service.connection_seconds is not None:  # running calls continue without limit
        options.append(("grpc.max_connection_age_ms", int(1e3 * service.connection_seconds)))
    interceptor = CallInterceptor(
        lambda: service.max_request_bytes,
        service.gates,
        [CertificateNames(settings.tls_client_names)] if settings.tls_client_names else (),
        OPEN_SERVICES,
        ConnectionGuard(),
    )
    server = grpc.aio.server(interceptors=[interceptor], options=options)
    mux = registered(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    if settings.reflection:
        reflected = (service.name, TraceServicer.name, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(reflected, server)
    port = listen(server, settings.host, settings.port, credentials)
    if settings.health_port is None:
        return [server], mux, port
    probed = grpc.aio.server(interceptors=[CallInterceptor(open_services=OPEN_SERVICES)], options=options)
    health_pb2_grpc.add_HealthServicer_to_server(checks, probed)
    health_port = listen(probed, settings.host, settings.health_port, None, "--health-port")
    log.info("answering_health_checks", address=joined(settings.host, health_port))
    return [server, probed], mux, port


async def _drain(seconds: float, servers: Sequence[grpc.aio.Server], mux: MuxServicer, checks: HealthServicer) -> None:
    for number in STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)  # a second signal kills the process immediately
    checks.drain()
    log.info("draining", seconds=seconds)
    mux.drain()
    await servers[0].stop(seconds)
    for server in servers[1:]:  # probes are answered until the drain ends
        await server.stop(None)


def listen(
    server: grpc.aio.Server, host: str, port: int, credentials: grpc.ServerCredentials | None, option: str = "--port"
) -> int:
    """Open a server's port, with TLS if there are credentials; return the port. ListenError if it cannot listen."""
    address = joined(host, port)
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:
        # gRPC gives no reason; the port was free a moment ago.
        raise ListenError.of(host, port, OSError(errno.EADDRINUSE, ""), option) from error


def all_metrics(service: Service, mux: MuxServicer, role: str) -> list[Metric]:
    """Return the metrics of a service and, if it has streams, of their traffic."""
    found = Families(role)
    if mux.has_streams:
        found.traffic(mux.traffic)
    return [*service.metrics(), *found.made]


def serve_metrics(settings: ServerSettings, collect: Callable[[], Iterable[Metric]]) -> MetricsEndpoint | None:
    """Serve metrics if a port is configured; ListenError if it is unavailable."""
    if settings.metrics_port is None:
        return None
    try:
        endpoint = MetricsEndpoint(settings.host, settings.metrics_port, collect)
    except OSError as error:
        raise ListenError.of(settings.host, settings.metrics_port, error, "--metrics-port") from error
    log.info("serving_metrics", address=joined(settings.host, endpoint.port))
    return endpoint


def span_exporter(settings: ServerSettings, service_name: str) -> SpanExporter | None:
    """Return the exporter of traces; None if none are sent. ModuleNotFoundError without the extra `otel`."""
    if settings.otlp_endpoint is None:
        return None
    from specdec.serving.tracing.spans import SpanExporter  # imports OpenTelemetry

    return SpanExporter(service_name, settings.otlp_endpoint.target, settings.trace_ratio)


def log_settings() -> None:
    """Log the settings and their sources, if the service was started by a command."""
    if (found := started_with()) is None:
        return
    log.info("settings", values={name: _plain(value) for name, value in found.values.items()}, sources=found.sources)
    if found.unknown:
        log.warning("unknown_settings", variables=found.unknown)


def _plain(value: object) -> object:
    """Return a setting as a JSON value."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if isinstance(value, bool | int | float | None) else str(value)


def announce(address: str) -> None:
    """Print the `ready` line on stdout. A failure to print does not stop the service."""
    try:
        print(f"ready {address}", flush=True)
    except OSError as error:
        log.warning("not_announced", address=address, why=str(error))


def registered(service: Servicer, server: grpc.aio.Server) -> MuxServicer:
    """Register a service's methods with a server, both as plain calls and on multiplexed connections; return the
    servicer of these connections."""
    mux = MuxServicer()
    service.register(server)
    service.register(cast("grpc.aio.Server", mux))
    if mux.has_streams:
        mux_pb2_grpc.add_MuxServiceServicer_to_server(mux, server)
    return mux


async def in_temporary_thread(load: Callable[[], Service]) -> Service:
    """Load a model in a thread that ends afterwards.

    OpenMP keeps a team of threads for every thread that has computed, as long as that thread lives. Once these threads
    outnumber the cores, they no longer spin between matrix products, which slows every step. So the stepping thread
    must be the only one with a team.
    """
    with ThreadPoolExecutor(1, "load") as thread:
        return await asyncio.wrap_future(thread.submit(load))


def stop_event(settings: ServerSettings) -> asyncio.Event:
    """Return an event set by SIGINT, SIGTERM or, if configured, the end of stdin."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, stop.set)
    if settings.stop_with_stdin:
        try:
            loop.add_reader(sys.stdin, _on_stdin, stop)
        except (OSError, ValueError):  # a file or /dev/null, never reported as closed
            raise StartError(
                "--stop-with-stdin: stdin must be a pipe or a terminal, so that its end can be detected"
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
    """Run a program. A failed start exits with status 1 and one line on stderr."""
    from specdec.engine.model_file import ModelDirectoryError
    from specdec.engine.unsupported import UnsupportedModelError

    guard_stderr()
    try:
        with needed_by(service_name, NEEDED[service_name]):  # engines are imported while loading
            asyncio.run(program)
    except (StartError, ListenError, TlsError, ModelDirectoryError, UnsupportedModelError) as error:
        print(f"{service_name}: {error}", file=sys.stderr)
        raise SystemExit(1) from None
