"""`specdec forget`: delete what draft services keep of a tenant's texts."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Annotated

import grpc
import typer

from specdec import ports
from specdec.cli.access import OPEN, Access, NameLookup, with_access
from specdec.cli.failure import STATUS, fail, say
from specdec.client.errors import SpecdecError, from_rpc
from specdec.command_line import addresses, duration
from specdec.exit_status import ExitStatus
from specdec.v2 import learning_pb2, learning_pb2_grpc
from specdec.wire.address import Address, parse_addresses

NOT_REMEMBERED = "NOT_REMEMBERED"
"""Error reason: the draft has forgotten the tenant, but could not record this for the next start."""

MAY_KEEP = ": it may still keep the texts"


@with_access
def forget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help='Name of the tenant; "" for texts without one.')],
    draft: Annotated[
        str,
        typer.Option(
            callback=addresses,
            help="Addresses of all draft services that keep texts or try versions, comma-separated: HOST:PORT each. A "
            "DNS name means every server that it has a record for.",
        ),
    ] = f"127.0.0.1:{ports.DRAFT}",
    timeout: Annotated[float, duration("Timeout in seconds, for each service.", min=0.001)] = 5.0,
    allowed: Access = OPEN,
) -> None:
    """Delete a tenant's texts that draft services keep for learning, and refuse the versions of their models that have
    learned from these texts. --api-key-file names a file with the key from the services' --learn-key-file."""
    forget_at(parse_addresses(draft), tenant, timeout, allowed)


def forget_at(
    addresses: Sequence[Address],
    tenant: str,
    timeout: float,
    allowed: Access,
    resolve: NameLookup = socket.getaddrinfo,
) -> None:
    """Have every server of these addresses forget a tenant, and print what it has forgotten. If any of them fails, end
    the process after the last one."""
    failed = list[tuple[str, ExitStatus]]()
    for at in addresses:
        try:
            servers = allowed.to_servers(at, resolve)
        except OSError as error:
            problem = f"{at.target}: cannot be resolved ({error.strerror}){MAY_KEEP}"
            failed.append((problem, ExitStatus.UNREACHABLE))
            continue  # the other services must still forget the tenant
        for target, access in servers.items():
            try:
                _forget(target, access, tenant, timeout)
            except SpecdecError as error:
                kept = "" if error.reason == NOT_REMEMBERED else MAY_KEEP
                failed.append((f"{target}: {error}{kept}", STATUS[type(error)]))
    for message, _ in failed[:-1]:
        say(message)
    if failed:
        fail(*failed[-1])


def _forget(target: str, access: Access, tenant: str, timeout: float) -> None:
    """Have one service forget a tenant; SpecdecError if it does not."""
    with access.channel(target) as channel:
        stub = learning_pb2_grpc.LearningServiceStub(channel)
        try:
            gone = stub.Forget(learning_pb2.ForgetRequest(tenant=tenant), timeout=timeout, metadata=access.metadata)
        except grpc.RpcError as error:
            raise from_rpc(error, "a draft service that keeps texts or tries versions") from None
    rolled_back = f"; rolled back: {', '.join(gone.versions)}" if gone.versions else ""
    print(f"{target}: {gone.texts} texts, {gone.tokens} tokens forgotten{rolled_back}")
    if not (gone.texts or gone.versions or gone.first_learned):
        say(f"{target}: nothing of tenant {tenant!r} was known here")
    if gone.first_learned:
        why = "the --model that this service started with has learned from this tenant"
        say(f"{target}: {why}: restart it with another one")
