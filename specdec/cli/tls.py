"""TLS options of the commands that ask a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import grpc
import typer

from specdec.client.tls_files import TlsError, TlsFiles, channel_credentials

Tls = Annotated[
    bool, typer.Option("--tls", envvar="SPECDEC_TLS", help="Use TLS, and trust the public authorities, as gRPC does.")
]
TlsCa = Annotated[
    Path | None,
    typer.Option(envvar="SPECDEC_TLS_CA", help="Use TLS, and trust the authorities in this PEM file, and no others."),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(envvar="SPECDEC_TLS_CERT", help="PEM file of a certificate to show to a server that asks for one."),
]
TlsKey = Annotated[
    Path | None, typer.Option(envvar="SPECDEC_TLS_KEY", help="PEM file of that certificate's key, unencrypted.")
]


def credentials(tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    """Return what a channel needs for these options; None if it is to have no TLS."""
    if not tls and ca is None:
        for option, file in (("--tls-cert", cert), ("--tls-key", key)):
            if file is not None:
                raise typer.BadParameter("is for TLS: give --tls-ca or --tls too", param_hint=f"'{option}'")
        return None
    try:
        return channel_credentials(TlsFiles(cert, key, ca, ("--tls-cert", "--tls-key", "--tls-ca")).read())
    except TlsError as error:
        raise typer.BadParameter(str(error)) from None


def channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Return a channel to a server, with TLS if there are credentials."""
    return grpc.insecure_channel(target) if credentials is None else grpc.secure_channel(target, credentials)
