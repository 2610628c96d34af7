"""Access to a server: the options for its address, the model, TLS and an API key."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Protocol

import grpc
import typer

from specdec import ports
from specdec.command_line import addresses
from specdec.serving.process.listening import joined
from specdec.signatures import parameters_of, with_parameters
from specdec.wire.address import Address, may_be_several, parse_addresses
from specdec.wire.tls_files import TlsError, TlsFiles, channel_credentials

ADDRESS = "SPECDEC_ADDRESS"
"""Environment variable of the address of orchestrators."""

Orchestrators = Annotated[
    str,
    typer.Option(
        callback=addresses,
        envvar=ADDRESS,
        help="Address of the orchestrator: HOST:PORT, or a gRPC target; several, comma-separated.",
    ),
]
ModelName = Annotated[
    str | None, typer.Option("--model", help="Model to use, if several are served: NAME or NAME@REVISION.")
]


def one_address(*given: Address | None) -> Address:
    """Return the given address, else the first one in $SPECDEC_ADDRESS, which may name several for other commands, else
    the default of orchestrators; typer.BadParameter for two given addresses that differ, or an invalid variable."""
    known = {address for address in given if address is not None}
    if len(known) > 1:
        raise typer.BadParameter(f"two addresses are given: {', '.join(sorted(address.target for address in known))}")
    if known:
        return known.pop()
    text = os.environ.get(ADDRESS) or f"127.0.0.1:{ports.ORCHESTRATOR}"
    try:
        return parse_addresses(text)[0]
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{ADDRESS}'") from None


class NameLookup(Protocol):
    """A DNS resolver, such as `socket.getaddrinfo`."""

    def __call__(self, host: str, port: int, *, type: int) -> Sequence[tuple[Any, ...]]: ...


@dataclass(frozen=True)
class Access:
    """Credentials of a command's calls: TLS, and an API key."""

    credentials: grpc.ChannelCredentials | None  # None: no TLS
    api_key: str | None = field(default=None, repr=False)
    tls_name: str | None = None  # expected name in the certificate; None: the address's

    def channel(self, target: str) -> grpc.Channel:
        """Return a channel to a server."""
        if self.credentials is None:
            return grpc.insecure_channel(target, self.options)
        return grpc.secure_channel(target, self.credentials, self.options)

    def to_servers(self, address: Address, resolve: NameLookup = socket.getaddrinfo) -> dict[str, Access]:
        """Return the access to every server of an address, by gRPC target. A DNS name other than localhost has one
        server for each record, and its servers' certificates must be for the name. If it has records of both families,
        those of IPv4 count, as when services listen on a name. OSError if a name cannot be resolved."""
        found: dict[str, Access] = {}
        for server in address.servers or (address.target,):
            if not may_be_several(server):
                found[server] = self
                continue
            name, _, port = server.removeprefix("dns:///").rpartition(":")
            records = resolve(name, int(port), type=socket.SOCK_STREAM)
            families = {family for family, *_ in records}
            used = socket.AF_INET if socket.AF_INET in families else socket.AF_INET6
            access = self if self.credentials is None else replace(self, tls_name=self.tls_name or name)
            hosts = sorted({record[0] for family, *_, record in records if family == used})
            found |= {joined(host, int(port)): access for host in hosts}
        return found

    @property
    def options(self) -> tuple[tuple[str, str | int], ...]:
        """Options of each channel. Commands connect directly: `http_proxy` of the environment is for the web."""
        name = () if self.tls_name is None else (("grpc.ssl_target_name_override", self.tls_name),)
        return (("grpc.enable_http_proxy", 0), *name)

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata of each call."""
        return () if self.api_key is None else (("authorization", f"Bearer {self.api_key}"),)

    @property
    def for_client(self) -> dict[str, Any]:
        """Arguments of a `Client` or an `AsyncClient`."""
        return {"credentials": self.credentials, "api_key": self.api_key, "options": self.options}


OPEN = Access(None)
"""Access to servers without TLS and authentication."""


def access(
    tls: Annotated[
        bool, typer.Option("--tls", envvar="SPECDEC_TLS", help="Use TLS with gRPC's default root CAs.")
    ] = False,
    tls_ca: Annotated[
        Path | None, typer.Option(envvar="SPECDEC_TLS_CA", help="Use TLS with only the CAs in this PEM file.")
    ] = None,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="SPECDEC_TLS_CERT", help="PEM file of the client certificate, for servers that require one."
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="SPECDEC_TLS_KEY", help="PEM file of that certificate's key, unencrypted.")
    ] = None,
    tls_name: Annotated[
        str | None,
        typer.Option(
            envvar="SPECDEC_TLS_NAME",
            help="Name to expect in the server's certificate, if it is not the host of its address, as with a pod's "
            "IP address or a forwarded port.",
        ),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            envvar="SPECDEC_API_KEY_FILE",
            help="File with the API key, for servers that require one. Default: the key in SPECDEC_API_KEY, if set.",
        ),
    ] = None,
) -> Access:
    """Return the access given by these options and the environment."""
    if tls_name is not None and not tls and tls_ca is None:
        raise typer.BadParameter("needs TLS: give --tls-ca or --tls too", param_hint="'--tls-name'")
    return Access(_credentials(tls, tls_ca, tls_cert, tls_key), _api_key(api_key_file), tls_name)


def with_access(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options of `access` in place of the parameter `allowed`, which receives their
    `Access`."""
    options = parameters_of(access)

    def run(**given: Any) -> None:
        allowed = access(**{name: given.pop(name) for name in options})
        command(**given, allowed=allowed)

    own = parameters_of(command)
    shown = [option for name in own for option in (options.values() if name == "allowed" else [own[name]])]
    return with_parameters(run, shown, command)


def api_key_in(file: Path, option: str) -> str:
    """Return the key in a file; BadParameter, naming the option, if the file is unreadable or does not contain one
    key."""
    hint = f"'{option}'"
    try:
        return _checked(file.read_text().strip(), hint, f"{file}: ")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{file}: {getattr(error, 'strerror', None) or error}", param_hint=hint) from None


def _api_key(file: Path | None) -> str | None:
    if file is not None:
        return api_key_in(file, "--api-key-file")
    key = os.environ.get("SPECDEC_API_KEY", "").strip()
    return _checked(key, "'SPECDEC_API_KEY'") if key else None


def _checked(key: str, hint: str, where: str = "") -> str:
    if not key or not key.isascii() or not key.isprintable():  # gRPC would abort the process
        raise typer.BadParameter(f"{where}must contain an API key: one line of printable ASCII", param_hint=hint)
    return key


def _credentials(tls: bool, ca: Path | None, cert: Path | None, key: Path | None) -> grpc.ChannelCredentials | None:
    if not tls and ca is None:
        for option, file in (("--tls-cert", cert), ("--tls-key", key)):
            if file is not None:
                raise typer.BadParameter("needs TLS: give --tls-ca or --tls too", param_hint=f"'{option}'")
        return None
    try:
        return channel_credentials(TlsFiles(cert, key, ca, ("--tls-cert", "--tls-key", "--tls-ca")).read())
    except TlsError as error:
        raise typer.BadParameter(str(error)) from None
