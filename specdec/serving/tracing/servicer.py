"""TraceService: returns a service's timelines of a request."""

from __future__ import annotations

import time

import grpc

from specdec.serving.echo import echo
from specdec.serving.errors import UnknownRequestError
from specdec.serving.timeline import KEPT, Timeline, Timelines
from specdec.v2 import trace_pb2, trace_pb2_grpc


class TraceServicer(trace_pb2_grpc.TraceServiceServicer):
    """Returns the timelines of one service."""

    name = "specdec.v2.TraceService"

    def __init__(self, service: str, timelines: Timelines) -> None:
        """`service` is the role in the timelines: "orchestrator", "verifier" or "draft"."""
        self._service = service
        self._timelines = timelines

    def register(self, server: grpc.aio.Server) -> None:
        trace_pb2_grpc.add_TraceServiceServicer_to_server(self, server)

    async def GetTrace(
        self,
        request: trace_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[trace_pb2.GetTraceRequest, trace_pb2.GetTraceResponse],
    ) -> trace_pb2.GetTraceResponse:
        return self.response_with(self.find(request.request_id))

    def find(self, request_id: str) -> list[Timeline]:
        """Return the timelines of a request; UnknownRequestError if none is recorded."""
        if found := self._timelines.find(request_id):
            return found
        raise UnknownRequestError(
            f"request_id: no timeline of {echo(request_id)} here. Each process keeps running requests and the last "
            f"{KEPT} that ended since it started; requests refused for lack of capacity are not recorded"
        )

    def response_with(self, timelines: list[Timeline]) -> trace_pb2.GetTraceResponse:
        now = time.monotonic()
        return trace_pb2.GetTraceResponse(timelines=[self._message(timeline, now) for timeline in timelines])

    def _message(self, timeline: Timeline, now: float) -> trace_pb2.Timeline:
        message = trace_pb2.Timeline(
            service=self._service,
            trace_id=timeline.trace_id,
            age_us=_age(timeline.began, now),
            end_age_us=None if timeline.ended is None else _age(timeline.ended, now),
            error=timeline.error,
            dropped_events=timeline.dropped_events,
        )
        message.attributes.update(dict(timeline.attributes))
        for recorded in list(timeline.events):  # the worker's thread may append to it meanwhile
            event = message.events.add(age_us=_age(recorded.at, now), name=recorded.name)
            event.attributes.update(recorded.attributes)
        return message


def _age(at: float, now: float) -> int:
    """Return `now - at` in microseconds, at least 0."""
    return max(0, round(1e6 * (now - at)))
