"""`specdec trace`: the timeline of a request, in all services."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import grpc
import typer

from specdec import ports
from specdec.cli.access import ADDRESS, OPEN, Access, one_address, with_access
from specdec.cli.failure import fail, status_of
from specdec.cli.stats_table import printable
from specdec.cli.trace_table import TraceTable
from specdec.client.errors import from_rpc
from specdec.command_line import address, duration
from specdec.v2.trace_pb2 import GetTraceRequest
from specdec.v2.trace_pb2_grpc import TraceServiceStub
from specdec.wire.address import Address

_OF_HTTP = re.compile("^(cmpl-|chatcmpl-|msg_)")
"""Prefixes of a request id in HTTP answers."""


@with_access
def trace(
    request_id: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST_ID",
            help="Request id, as in the output of `specdec generate`, the clients' `request_id`, errors and logs, or "
            "the id of a completion, chat completion or message; for a response, the HTTP header x-request-id.",
        ),
    ],
    given: Annotated[
        Address | None,
        typer.Option(
            "--address",
            parser=address,
            metavar="ADDRESS",
            help="Address of the orchestrator, which also queries its pods, or of a pod, for its own part. Default: "
            f"the first of {ADDRESS}, else 127.0.0.1:{ports.ORCHESTRATOR}.",
            show_default=False,
        ),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    timeout: Annotated[float, duration("Timeout in seconds.", min=0.001)] = 5.0,
    allowed: Access = OPEN,
) -> None:
    """Show the timeline of a request, in all services.

    Services keep timelines of running requests and of the last few hundred completed ones.
    """
    request_id = _OF_HTTP.sub("", request_id)
    at = one_address(given)
    with allowed.channel(at.target) as opened:
        stub: Any = TraceServiceStub(opened)
        try:
            response = stub.GetTrace(GetTraceRequest(request_id=request_id), timeout=timeout, metadata=allowed.metadata)
        except grpc.RpcError as error:
            fail(f"{at.target}: {printable(str(from_rpc(error)))}", status_of(error.code()))
    table = TraceTable(response)
    if json_output:
        print(json.dumps({"request_id": request_id, **table.as_json()}))
    else:
        print(*table.lines(), sep="\n")
