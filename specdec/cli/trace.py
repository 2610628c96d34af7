"""`specdec trace`: the timeline of a request, in all services."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

import grpc
import typer
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from specdec import ports
from specdec.cli.access import ADDRESS, OPEN, Access, one_address, with_access
from specdec.cli.failure import fail, status_of
from specdec.cli.stats_table import printable
from specdec.client.errors import from_rpc
from specdec.command_line import address, duration
from specdec.v2.trace_pb2 import GetTraceRequest, GetTraceResponse, Timeline
from specdec.v2.trace_pb2_grpc import TraceServiceStub
from specdec.wire.address import Address

_OF_HTTP = re.compile("^(cmpl-|chatcmpl-|msg_)")
"""Prefixes of a request id in HTTP answers."""

SPECULATION = "speculation"
"""Attribute with one sentence per sample; each sentence is printed on its own line."""


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


class TraceTable:
    """The timelines of a request in all services, on one time axis: microseconds since the first of them began."""

    def __init__(self, response: GetTraceResponse) -> None:
        self._timelines = list(response.timelines)
        self._missing = list(response.missing)
        self._oldest = max((timeline.age_us for timeline in self._timelines), default=0)

    def as_json(self) -> dict[str, Any]:
        return {
            "timelines": [self._timeline(timeline) for timeline in self._timelines],
            "missing": [{"pod": missing.pod, "reason": missing.reason} for missing in self._missing],
        }

    def lines(self) -> Iterator[str]:
        """Yield lines for a person: the events in order, each with its time and place."""
        where = [" ".join(filter(None, (timeline.service, timeline.pod))) for timeline in self._timelines]
        width = max(map(len, where), default=0)
        happened = [
            (at, f"{place:{width}}  {what}")
            for place, timeline in zip(where, self._timelines, strict=True)
            for at, what in self._happened(timeline)
        ]
        for at, what in sorted(happened, key=lambda event: event[0]):  # stable: ties in the order of the services
            yield printable(f"{at / 1000:>12.1f} ms  {what}")
        for place, timeline in zip(where, self._timelines, strict=True):
            yield from self._remarks(printable(place), timeline)
        for missing in self._missing:
            yield printable(f"missing: {missing.pod or 'another worker of the orchestrator'}: {missing.reason}")

    def _happened(self, timeline: Timeline) -> Iterator[tuple[int, str]]:
        yield self._at(timeline.age_us), "begin"
        for event in timeline.events:
            yield self._at(event.age_us), f"{event.name}{_spelled(_values(event.attributes))}"
        if timeline.HasField("end_age_us"):
            failed = f" failed={timeline.error}" if timeline.error else ""
            yield self._at(timeline.end_age_us), f"end{failed}{_spelled(_values(timeline.attributes))}"

    def _remarks(self, place: str, timeline: Timeline) -> Iterator[str]:
        for why in _values(timeline.attributes).get(SPECULATION, ()):
            yield printable(f"speculation: {why}")
        if not timeline.HasField("end_age_us"):
            yield printable(f"running: {place}{_spelled(_values(timeline.attributes))}")
        if timeline.dropped_events:
            yield f"left out: {timeline.dropped_events} events of {place}"
        if timeline.clock_error_us:
            yield f"accuracy: the times of {place} may be shifted by {timeline.clock_error_us / 1000:.1f} ms"

    def _timeline(self, timeline: Timeline) -> dict[str, Any]:
        return {
            "service": timeline.service,
            "pod": timeline.pod,
            "trace_id": timeline.trace_id,
            "begin_us": self._at(timeline.age_us),
            "end_us": self._at(timeline.end_age_us) if timeline.HasField("end_age_us") else None,
            "clock_error_us": timeline.clock_error_us,
            "error": timeline.error,
            "attributes": _values(timeline.attributes),
            "events": [
                {"at_us": self._at(event.age_us), "name": event.name, "attributes": _values(event.attributes)}
                for event in timeline.events
            ],
            "dropped_events": timeline.dropped_events,
        }

    def _at(self, age_us: int) -> int:
        return self._oldest - age_us


def _values(attributes: Struct) -> dict[str, Any]:
    """Return attributes by name, with whole numbers as int, since a Struct has only floats."""
    return {name: _whole(value) for name, value in sorted(MessageToDict(attributes).items())}


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _spelled(values: Mapping[str, Any]) -> str:
    return "".join(f" {key}={_short(value)}" for key, value in values.items() if key != SPECULATION)


def _short(value: Any) -> str:
    match value:
        case list():
            return ",".join(map(str, value))
        case bool():
            return str(value).lower()
        case float():
            return f"{value:.4g}"
        case _:
            return str(value)
