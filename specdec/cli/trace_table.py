"""The timelines of a request in all services, on one time axis that starts with the first of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct

from specdec.cli.stats_table import printable
from specdec.v2.trace_pb2 import GetTraceResponse, Timeline

SPECULATION = "speculation"
"""Attribute with one sentence per sample; each sentence is printed on its own line."""


class TraceTable:
    """A trace, with all times in microseconds relative to its start."""

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
