"""`specdec openai`: serve OpenAI's and Anthropic's HTTP APIs in front of orchestrators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from specdec.extras import needed_by

with needed_by("openai", "openai"):
    import typer

    from specdec import ports
    from specdec.command_line import address, run_command
    from specdec.openai_api.http_server import KEEP_ALIVE_SECONDS, MAX_CONNECTIONS
    from specdec.openai_api.origins import origin
    from specdec.openai_api.process import OrchestratorEndpoints, serve
    from specdec.openai_api.response_store import (
        MAX_STORED_BYTES,
        STORED_SECONDS,
        ResponseStore,
        ResponseStoreError,
    )
    from specdec.serving.process.options import GRPC_ONLY, serving
    from specdec.serving.process.server import ServerSettings, run_program
    from specdec.wire.address import Address
    from specdec.wire.tls_files import TlsError, TlsFiles


@serving(ports.OPENAI, without=GRPC_ONLY)
def main(
    orchestrator: Annotated[
        list[Address] | None,
        typer.Option(
            parser=address,
            metavar="ADDRESS",
            help="Address of an orchestrator: HOST:PORT, or a gRPC target. dns:///NAME:PORT stands for one "
            f"orchestrator per DNS record of the name. May be repeated. Default: 127.0.0.1:{ports.ORCHESTRATOR}.",
        ),
    ] = None,
    max_connections: Annotated[
        int, typer.Option(min=1, help="Maximum open connections; at the limit a new one replaces an idle one.")
    ] = MAX_CONNECTIONS,
    keep_alive_seconds: Annotated[
        int,
        typer.Option(
            min=1,
            help="Seconds before an idle keep-alive connection is closed; must be longer than the idle timeout of a "
            "load balancer in front.",
        ),
    ] = KEEP_ALIVE_SECONDS,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            parser=origin,
            metavar="ORIGIN",
            help="Allowed CORS origin, such as https://chat.example.com; * for any. May be repeated. Default: none.",
        ),
    ] = None,
    serve_metrics: Annotated[
        bool | None,
        typer.Option(
            "--serve-metrics/--no-serve-metrics",
            help="Also serve /metrics (for callers with an accepted key) and /v1/specdec/stats (for callers allowed to "
            "read statistics) on this port. Default: only if --host is a loopback address.",
        ),
    ] = None,
    strict_fields: Annotated[
        bool, typer.Option(help="Refuse unknown fields. By default they are ignored, and the answer names them.")
    ] = False,
    page: Annotated[
        bool,
        typer.Option(help="Serve a page that shows speculation at /."),
    ] = True,
    response_store: Annotated[
        str,
        typer.Option(
            metavar="off|memory|FILE",
            help="Where to store responses of /v1/responses, so that later requests can continue them by id: nowhere, "
            "in memory, or in a SQLite file, which servers of one machine may share.",
        ),
    ] = "memory",
    response_store_mib: Annotated[
        int, typer.Option(min=1, help="Maximum MiB of stored responses; beyond it the oldest are evicted.")
    ] = MAX_STORED_BYTES >> 20,
    response_store_hours: Annotated[
        float, typer.Option(min=0.001, help="Hours for which a response is stored.")
    ] = STORED_SECONDS / 3600,
    orchestrator_tls_ca: Annotated[
        Path | None,
        typer.Option(
            help="PEM file of the CAs that sign the certificates of orchestrators. With it, calls to them use TLS."
        ),
    ] = None,
    orchestrator_tls_cert: Annotated[
        Path | None, typer.Option(help="PEM file of the client certificate for orchestrators that require one.")
    ] = None,
    orchestrator_tls_key: Annotated[
        Path | None, typer.Option(help="PEM file of that certificate's key, unencrypted.")
    ] = None,
    *,
    server: ServerSettings,
) -> None:
    """Serve OpenAI's and Anthropic's HTTP APIs in front of orchestrators: /v1/completions, /v1/chat/completions,
    /v1/responses, /v1/messages, /v1/models.

    API keys are passed to the orchestrators, which check them.
    """
    addresses = orchestrator or [address(f"127.0.0.1:{ports.ORCHESTRATOR}")]
    names = ("--orchestrator-tls-cert", "--orchestrator-tls-key", "--orchestrator-tls-ca")
    theirs = TlsFiles(orchestrator_tls_cert, orchestrator_tls_key, orchestrator_tls_ca, names)
    try:
        theirs.read()
    except TlsError as error:
        raise typer.BadParameter(str(error)) from None
    store: ResponseStore | None = None
    if response_store != "off":
        file = None if response_store == "memory" else Path(response_store)
        try:
            store = ResponseStore(file, most_bytes=response_store_mib << 20, seconds=3600 * response_store_hours)
        except ResponseStoreError as error:
            raise typer.BadParameter(str(error), param_hint="--response-store") from None
    endpoints = OrchestratorEndpoints([parsed.target for parsed in addresses], theirs if any(theirs.all) else None)
    program = serve(
        server,
        endpoints,
        most_connections=max_connections,
        keep_alive_seconds=keep_alive_seconds,
        origins=allow_origin or (),
        with_page=page,
        store=store,
        strict=strict_fields,
        serve_metrics_here=serve_metrics,
    )
    run_program(program, "openai")


if __name__ == "__main__":
    run_command(main, service="openai")
