"""TraceService of an orchestrator: the timelines of a request here, at the other workers, and at the pods it used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import grpc

from orchestrator.pods.errors import LostError
from orchestrator.pods.pods import Pod
from orchestrator.pods.unary import answer_of
from orchestrator.workers import Siblings
from specdec.serving.errors import UnknownRequestError
from specdec.serving.timeline import Timelines
from specdec.serving.tracing.servicer import TraceServicer
from specdec.v2 import trace_pb2, trace_pb2_grpc

ASK_SECONDS = 1.0
"""Timeout in seconds for the answers of the other workers, and again for those of the pods."""

MAX_PART_BYTES = 1 << 20
"""Maximum size of a pod's part in bytes. Our own services send some kilobytes for each session."""

MAX_AGE_US = 1 << 62
"""Limit on ages from pods, in microseconds: they may report anything."""


class TracePart(NamedTuple):
    """The answer of one process about a request."""

    response: trace_pb2.GetTraceResponse
    at: float  # reference time of its ages: time.monotonic


class OrchestratorTraceServicer(TraceServicer):
    """Returns the timelines of a request from all processes."""

    def __init__(
        self, timelines: Timelines, pods: Callable[[], Iterable[Pod]], siblings: Siblings | None = None
    ) -> None:
        """`pods` returns the pods known now; `siblings` are the other workers, if there are any."""
        super().__init__("orchestrator", timelines)
        self._pods = pods
        self._siblings = siblings

    async def GetTrace(
        self,
        request: trace_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[trace_pb2.GetTraceRequest, trace_pb2.GetTraceResponse],
    ) -> trace_pb2.GetTraceResponse:
        own = await self._recorded(request)
        used = dict.fromkeys(pods_of(own))
        return merged([own, *await asyncio.gather(*(self._of_pod(address, request) for address in used))])

    async def _recorded(self, request: trace_pb2.GetTraceRequest) -> TracePart:
        """Return the timelines of all workers, oldest first; UnknownRequestError if there are none."""
        parts = list[TracePart]()
        unknown: UnknownRequestError | None = None
        try:
            parts.append(TracePart(self.response_with(self.find(request.request_id)), time.monotonic()))
        except UnknownRequestError as error:
            unknown = error
        if self._siblings is not None:
            asked = (_of_sibling(channel, request) for channel in self._siblings.channels())
            parts += filter(None, await asyncio.gather(*asked))
        response = merged(parts)
        if unknown is not None and not response.timelines:
            unanswered = f"; workers that do not answer: {len(response.missing)}" if response.missing else ""
            raise UnknownRequestError(f"{unknown}{unanswered}")
        response.timelines.sort(key=lambda timeline: -timeline.age_us)
        return TracePart(response, time.monotonic())

    async def _of_pod(self, address: str, request: trace_pb2.GetTraceRequest) -> TracePart:
        """Return a pod's part, or the reason why it is missing."""
        why = "its address is no longer known"
        if (pod := self._pod(address)) is not None:
            try:
                part = await _ask(pod.channel, request)
                if (size := part.response.ByteSize()) > MAX_PART_BYTES:
                    raise LostError(f"its part has {size} bytes, at most {MAX_PART_BYTES} are allowed")
            except grpc.aio.AioRpcError as error:
                why = _why(error)
            except LostError as error:
                why = str(error)
            else:
                for timeline in part.response.timelines:
                    timeline.pod = address
                return part
        missing = trace_pb2.MissingPart(pod=address, reason=why)
        return TracePart(trace_pb2.GetTraceResponse(missing=[missing]), time.monotonic())

    def _pod(self, address: str) -> Pod | None:
        return next((pod for pod in self._pods() if pod.address == address), None)


async def _of_sibling(channel: grpc.aio.Channel, request: trace_pb2.GetTraceRequest) -> TracePart | None:
    """Return another worker's part, or the reason why it is missing; None if that worker has no part."""
    try:
        return await _ask(channel, request)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return None
        missing = trace_pb2.MissingPart(reason=_why(error))
    except LostError as error:
        missing = trace_pb2.MissingPart(reason=str(error))
    return TracePart(trace_pb2.GetTraceResponse(missing=[missing]), time.monotonic())


async def _ask(channel: grpc.aio.Channel, request: trace_pb2.GetTraceRequest) -> TracePart:
    """Ask a process for its part, and assume that its ages refer to the middle of the call."""
    begin = time.monotonic()
    stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
    response: trace_pb2.GetTraceResponse = await answer_of(stub.GetTrace, request, ASK_SECONDS)
    half = (time.monotonic() - begin) / 2
    for timeline in response.timelines:
        timeline.clock_error_us = round(1e6 * half)
    return TracePart(response, begin + half)


def merged(parts: Iterable[TracePart]) -> trace_pb2.GetTraceResponse:
    """Merge parts into one answer, with all ages as of now."""
    whole, now = trace_pb2.GetTraceResponse(), time.monotonic()
    for response, at in parts:
        for timeline in response.timelines:
            _shift(timeline, round(1e6 * (now - at)))
        whole.MergeFrom(response)
    return whole


def pods_of(own: TracePart) -> list[str]:
    """Return the addresses of the pods named in events."""
    return [
        event.attributes["pod"]
        for timeline in own.response.timelines
        for event in timeline.events
        if "pod" in event.attributes and isinstance(event.attributes["pod"], str)
    ]


def _shift(timeline: trace_pb2.Timeline, by: int) -> None:
    """Increase all ages of a timeline, since time has passed."""
    timeline.age_us = min(timeline.age_us + by, MAX_AGE_US)
    if timeline.HasField("end_age_us"):
        timeline.end_age_us = min(timeline.end_age_us + by, MAX_AGE_US)
    for event in timeline.events:
        event.age_us = min(event.age_us + by, MAX_AGE_US)


def _why(error: grpc.aio.AioRpcError) -> str:
    """Return why a process's part is missing, without repeating its words."""
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return "it has no timeline of this request: it has restarted since, or has dropped it"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "its version has no timelines"
        case code:
            return f"it does not answer ({code.name})"
