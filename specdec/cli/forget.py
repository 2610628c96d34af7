"""`specdec forget`: delete what draft services keep of a tenant's texts."""

from __future__ import annotations

from typing import Annotated

import grpc
import typer

from specdec import ports
from specdec.cli.access import OPEN, Access, with_access
from specdec.cli.failure import STATUS, fail, say
from specdec.client.errors import from_rpc
from specdec.command_line import addresses, duration
from specdec.exit_status import ExitStatus
from specdec.v2 import learning_pb2, learning_pb2_grpc
from specdec.wire.address import parse_addresses

NOT_REMEMBERED = "NOT_REMEMBERED"
"""Error reason: the draft has forgotten the tenant, but could not record this for the next start."""


@with_access
def forget(
    tenant: Annotated[str, typer.Argument(metavar="TENANT", help='Name of the tenant; "" for texts without one.')],
    draft: Annotated[
        str,
        typer.Option(
            callback=addresses,
            help="Addresses of all draft services that keep texts or try versions, comma-separated: HOST:PORT each.",
        ),
    ] = f"127.0.0.1:{ports.DRAFT}",
    timeout: Annotated[float, duration("Timeout in seconds, for each service.", min=0.001)] = 5.0,
    allowed: Access = OPEN,
) -> None:
    """Delete a tenant's texts that draft services keep for learning, and refuse the versions of their models that have
    learned from these texts. --api-key-file names a file with the key from the services' --learn-key-file."""
    request, failed = learning_pb2.ForgetRequest(tenant=tenant), list[tuple[str, ExitStatus]]()
    for at in parse_addresses(draft):
        with allowed.channel(at.target) as channel:
            stub = learning_pb2_grpc.LearningServiceStub(channel)
            try:
                gone = stub.Forget(request, timeout=timeout, metadata=allowed.metadata)
            except grpc.RpcError as error:
                problem = from_rpc(error)
                kept = "" if problem.reason == NOT_REMEMBERED else ": it may still keep the texts"
                failed.append((f"{at.target}: {problem}{kept}", STATUS[type(problem)]))
                continue  # the other services must still forget the tenant
        rolled_back = f"; rolled back: {', '.join(gone.versions)}" if gone.versions else ""
        print(f"{at.target}: {gone.texts} texts, {gone.tokens} tokens forgotten{rolled_back}")
        if gone.first_learned:
            why = "the --model that this service started with has learned from this tenant"
            say(f"{at.target}: {why}: restart it with another one")
    for message, _ in failed[:-1]:
        say(message)
    if failed:
        fail(*failed[-1])
