"""Options shared by services: listening, TLS, observability and shutdown for all, and the options of a model for
some."""

from __future__ import annotations

from collections.abc import Callable, Container
from pathlib import Path
from typing import Annotated, Any

import typer

from specdec.command_line import Host, LogLevel, address, duration, number
from specdec.engine.cpu_count import MAX_THREADS
from specdec.serving.callers.certificate import parse_name
from specdec.serving.process.listening import is_loopback
from specdec.serving.process.server import ServerSettings
from specdec.signatures import parameters_of, with_parameters
from specdec.wire.address import Address
from specdec.wire.tls_files import TlsFiles

SERVER = "server"
"""The parameter of a service's command that these options replace."""

GRPC_ONLY = ("tls_client_name", "health_port", "otlp_endpoint", "trace_ratio", "reflection")
"""Options that an HTTP server lacks."""

# Options of services with a model.
Device = Annotated[str, typer.Option(help="Device of the model: cpu, cuda, or cuda:N for one of several GPUs.")]
Threads = Annotated[
    int | None,
    typer.Option(
        min=1,
        max=MAX_THREADS,
        help="CPU threads of the forward pass; fewer than the machine's cores if another service shares it. Default: "
        "one for each core available to the process; 1 with a GPU.",
    ),
]
KvTokens = Annotated[
    int | None,
    typer.Option(
        min=512,
        help="Size of the KV cache in tokens. Default: room for 64 texts of full context (on a CPU: of at most 1,024 "
        "tokens each), but at least one full context and at most half of the free memory.",
    ),
]
MaxSessions = Annotated[int, typer.Option(min=1, help="Maximum open sessions; further ones are refused.")]
MaxSessionsPerClient = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Maximum open sessions per client certificate, or per host without certificates; further ones are "
        "refused. Default: only --max-sessions applies.",
    ),
]


def server_settings(
    host: Host = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")] = 0,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the server's certificate, followed by intermediate ones. With it, the server requires "
            "TLS."
        ),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="PEM file of the certificate's key, unencrypted.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(help="PEM file of CAs: clients must present a certificate signed by one of them."),
    ] = None,
    tls_client_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Required subject alternative name (host, IP address or URI) of a client's certificate, in addition "
            "to --tls-client-ca. May be repeated: one match is enough. Default: any name."
        ),
    ] = None,
    health_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of a second server for health checks only, without TLS: for probes that do not support TLS.",
        ),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the Prometheus metrics, at /metrics, over HTTP without TLS."),
    ] = None,
    otlp_endpoint: Annotated[
        Address | None,
        typer.Option(
            parser=address,
            metavar="ADDRESS",
            help="Address of an OpenTelemetry collector, HOST:PORT, for traces by OTLP over gRPC, without TLS. "
            "Default: traces are not exported. Needs the extra `otel`.",
        ),
    ] = None,
    trace_ratio: Annotated[
        float,
        number(
            "With --otlp-endpoint: share of requests to trace, where the caller's trace context does not decide.",
            min=0.0,
            max=1.0,
        ),
    ] = 1.0,
    reflection: Annotated[
        bool | None,
        typer.Option(
            "--reflection/--no-reflection",
            help="Enable gRPC server reflection, so that tools such as grpcurl need no proto files. Default: only if "
            "--host is a loopback address.",
        ),
    ] = None,
    drain_seconds: Annotated[
        float,
        duration("Seconds for running requests to finish during a shutdown; the rest are cancelled."),
    ] = 30.0,
    log_level: LogLevel = "info",
    stop_with_stdin: Annotated[
        bool, typer.Option(help="Stop when stdin closes, so that a child process does not outlive its parent.")
    ] = False,
) -> ServerSettings:
    """Return the server settings for these options."""
    files = TlsFiles(tls_cert, tls_key, tls_client_ca)
    if tls_client_name and tls_client_ca is None:
        raise typer.BadParameter(
            "is for clients with certificates: give --tls-client-ca too", param_hint="'--tls-client-name'"
        )
    try:
        names = tuple(map(parse_name, tls_client_name or ()))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--tls-client-name'") from None
    return ServerSettings(
        host,
        port,
        drain_seconds,
        log_level,
        stop_with_stdin,
        tls=files if any(files.all) else None,
        tls_client_names=names,
        health_port=health_port,
        metrics_port=metrics_port,
        otlp_endpoint=otlp_endpoint,
        trace_ratio=trace_ratio,
        reflection=is_loopback(host) if reflection is None else reflection,
    )


def serving(port: int, *, without: Container[str] = ()) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a service's command: replace its parameter `server` by the options common to all services, with this
    default port and `without` some of them. The command receives them as ServerSettings."""
    shared = {name: option for name, option in parameters_of(server_settings).items() if name not in without}
    shared["port"] = shared["port"].replace(default=port)

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def run(**given: Any) -> None:
            settings = server_settings(**{name: given.pop(name) for name in shared})
            command(**given, **{SERVER: settings})

        own = parameters_of(command)
        options = [option for name in own for option in (shared.values() if name == SERVER else [own[name]])]
        return with_parameters(run, options, command)

    return decorate
