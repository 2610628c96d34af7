"""Command lines: how a function becomes a command, and the options that several commands share.

Help and errors are plain text: in 80 columns rich's tables would cut long names of options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from specdec.client.address import Address, parse_addresses
from specdec.client.tls_files import TlsFiles

DAY = 86_400.0
"""Seconds."""


def duration(help: str, *, min: float = 0.0, max: float = DAY) -> Any:
    """Return an option for a duration. A value that does not fit is refused with the option, the value and the limits;
    "nan" never fits."""

    def check(value: float | None) -> float | None:
        if value is not None and math.isnan(value):
            raise typer.BadParameter(f"{value} is not a number; should be from {min:g} to {max:g}")
        return value

    return typer.Option(min=min, max=max, help=help, callback=check)


def address(text: str) -> Address:
    """Parse the address that an option gives; a wrong one is refused by option and value, with what is accepted."""
    try:
        return Address.parse(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None


def addresses(text: str) -> str:
    """Return the addresses that an option gives, joined by commas, as they are; refuse them as `address` does."""
    try:
        parse_addresses(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 listens on all interfaces.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")]
DrainSeconds = Annotated[
    float,
    duration("Seconds that running requests get to finish when the service is told to stop; the rest is cancelled."),
]
LogLevel = Annotated[
    Literal["debug", "info", "warning", "error"], typer.Option(help="Lowest level of log messages to write.")
]
HealthPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of a second server that answers health checks alone, without TLS: for probes, which know none.",
    ),
]
MetricsPort = Annotated[
    int | None,
    typer.Option(min=0, max=65535, help="Port on which Prometheus finds metrics, at /metrics, by HTTP without TLS."),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(help="PEM file of the server's certificate, intermediate ones after it. With it all calls need TLS."),
]
TlsKey = Annotated[Path | None, typer.Option(help="PEM file of the certificate's key, unencrypted.")]
TlsClientCa = Annotated[
    Path | None,
    typer.Option(help="PEM file of authorities: only clients that show a certificate of theirs are served."),
]


def server_tls(certificate: Path | None, key: Path | None, client_authorities: Path | None) -> TlsFiles | None:
    """Return the files of a server's TLS options; None if it is to have no TLS."""
    given = TlsFiles(certificate, key, client_authorities)
    return given if any(given.all) else None


StopWithStdin = Annotated[
    bool, typer.Option(help="Stop when stdin closes, so that a child process does not outlive its parent.")
]


def run_command(
    command: Callable[..., None],
    name: str | None = None,
    arguments: Sequence[str] | None = None,
    *,
    service: str | None = None,
) -> None:
    """Run a function as a command, with its docstring and options as the help, and end the process.

    By default the arguments are this process's, and usage lines call the command by the program that was started. The
    options of a `service` may stand in the environment and in a file as well (`settings.py`).
    """
    if service is not None:
        from specdec.settings import configurable  # brings YAML, which the client's commands need not have

        command = configurable(service, command)
    app = typer.Typer(add_completion=False, rich_markup_mode=None)
    app.command()(command)
    app(arguments, prog_name=name)
