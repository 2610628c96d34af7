"""`specdec stats`: what a service is doing."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Annotated

import typer

from specdec.cli.failure import fail, status_of
from specdec.client.address import Address
from specdec.command_line import address, duration

if TYPE_CHECKING:
    from specdec.v2.verifier_pb2 import GetStatsResponse


def stats(
    at: Annotated[
        Address,
        typer.Argument(
            parser=address, metavar="ADDRESS", help="Address of a verifier: HOST:PORT, or as gRPC spells it."
        ),
    ],
    every: Annotated[
        float | None, duration("Seconds between two lines. By default one line is printed.", min=0.1)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print each line as a JSON object.")] = False,
) -> None:
    """Show how full and how busy a verifier is."""
    import grpc
    from google.protobuf.json_format import MessageToDict

    from specdec.v2 import verifier_pb2, verifier_pb2_grpc

    with grpc.insecure_channel(at.target) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        while True:
            try:
                seen = stub.GetStats(verifier_pb2.GetStatsRequest(), timeout=10)
            except grpc.RpcError as error:
                fail(f"{at.target}: {error.code().name}: {error.details()}", status_of(error.code()))
            if json_output:
                values = MessageToDict(
                    seen, always_print_fields_with_no_presence=True, preserving_proto_field_name=True
                )
                print(
                    json.dumps({name: v if isinstance(v, list) else int(v) for name, v in values.items()}), flush=True
                )
            else:
                print(_stats_line(seen), flush=True)
            if every is None:
                return
            time.sleep(every)


def _stats_line(seen: GetStatsResponse) -> str:
    memory = 100 / max(1, seen.kv_tokens)
    return (
        f"{seen.running} running, {seen.waiting} waiting; "
        f"memory {memory * seen.kv_held_tokens:.0f} % held, {memory * seen.kv_cached_tokens:.0f} % cached "
        f"of {seen.kv_tokens} tokens; {100 * seen.busy_us / max(1, seen.up_us):.0f} % busy since the start; "
        f"{seen.committed_tokens} tokens in {seen.steps} steps, "
        f"{seen.accepted_candidates} of {seen.offered_candidates} candidates accepted, "
        f"{seen.cached_tokens} of {seen.prompt_tokens} prompt tokens cached, "
        f"{seen.preemptions} preemptions"
    )
