"""`specdec stats`: a service's identity and load."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Annotated

import grpc
import typer

from specdec import ports
from specdec.cli.access import ApiKeyFile, Tls, TlsCa, TlsCert, TlsKey, TlsName, access
from specdec.cli.failure import fail, status_of
from specdec.cli.pod_stats import NoSuchServiceError, PodStats, ask
from specdec.cli.stats_table import printable, table
from specdec.client.errors import mismatch
from specdec.command_line import address, duration
from specdec.exit_status import ExitStatus
from specdec.wire.address import Address


def stats(
    at: Annotated[
        Address,
        typer.Argument(
            parser=address,
            metavar="ADDRESS",
            help="Address of an orchestrator, verifier or draft service: HOST:PORT, or a gRPC target.",
        ),
    ] = f"127.0.0.1:{ports.ORCHESTRATOR}",  # type: ignore[assignment]  # the parser takes it as it takes others
    watch: Annotated[
        float | None, duration("Refresh interval in seconds, until Ctrl-C. Default: print once.", min=0.1)
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print one JSON object per refresh, one per line.")
    ] = False,
    timeout: Annotated[float, duration("Timeout in seconds.", min=0.001)] = 5.0,
    tls: Tls = False,
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
    api_key_file: ApiKeyFile = None,
) -> None:
    """Show a service's identity and load; for an orchestrator also its pods."""
    before: PodStats | None = None
    allowed = access(tls, tls_ca, tls_cert, tls_key, tls_name, api_key_file)
    with allowed.channel(at.target) as opened:
        while True:
            try:
                seen = ask(opened, timeout, allowed.metadata)
            except (grpc.RpcError, NoSuchServiceError) as error:
                line, status = _told(error, at.target, timeout)
                if before is None:
                    fail(line, status)
                print(f"specdec: {line}", file=sys.stderr, flush=True)  # it may return: keep watching
            else:
                if json_output:
                    print(json.dumps({"address": at.target, **seen.as_json()}), flush=True)
                else:
                    print(*([""] if before else []), *table(at.target, seen, before), sep="\n", flush=True)
                before = seen
            if watch is None:
                return
            time.sleep(watch)


def _told(error: Exception, target: str, timeout: float) -> tuple[str, ExitStatus]:
    """Return the error message for a failed query, and the exit status."""
    if not isinstance(error, grpc.RpcError):
        return (
            f"{target}: a gRPC server answers, but has no statistics of a specdec.v2 orchestrator, verifier or draft "
            "service",
            ExitStatus.REFUSED,
        )
    code, details = error.code(), printable(" ".join(str(error.details()).split()))
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"{target}: no answer within {timeout:g} s", ExitStatus.UNREACHABLE
    if code is grpc.StatusCode.UNAVAILABLE:
        why = re.sub("^[A-Z_]+: ", "", details.rpartition("last error: ")[2])
        return f"{target}: {mismatch(why) or f'no gRPC server answers ({why})'}", ExitStatus.UNREACHABLE
    return f"{target}: {code.name}: {details}", status_of(code)
