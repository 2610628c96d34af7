"""TraceService of an orchestrator: its own timelines of a request, and those of the pods that the request used."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Any

import grpc

from orchestrator.pod_errors import LostError
from orchestrator.pods import Pod
from orchestrator.unary import answer_of
from specdec.serving.propagation import carried
from specdec.serving.timeline import Timeline, Timelines
from specdec.serving.tracing.servicer import TraceServicer
from specdec.v2 import trace_pb2, trace_pb2_grpc

ASK_SECONDS = 1.0
"""Seconds that pods get to answer."""

LONGEST_US = 1 << 62
"""Longest age that is passed on, in microseconds: what a pod says may be anything."""


class OrchestratorTraceServicer(TraceServicer):
    """Tells what happened to a request everywhere."""

    def __init__(self, timelines: Timelines, pods: Callable[[], Iterable[Pod]]) -> None:
        """`pods` returns those that may be asked now."""
        super().__init__("orchestrator", timelines)
        self._pods = pods

    async def GetTrace(
        self,
        request: trace_pb2.GetTraceRequest,
        context: grpc.aio.ServicerContext[trace_pb2.GetTraceRequest, trace_pb2.GetTraceResponse],
    ) -> trace_pb2.GetTraceResponse:
        timelines = self.find(request.request_id)
        used = dict.fromkeys(pods_of(timelines))
        parts = await asyncio.gather(*(self._ask(address, request) for address in used))
        told, now = self.told(timelines), time.monotonic()
        for part, answered in parts:
            for timeline in part.timelines:
                _shift(timeline, round(1e6 * (now - answered)))
            told.MergeFrom(part)
        return told

    async def _ask(self, address: str, request: trace_pb2.GetTraceRequest) -> tuple[trace_pb2.GetTraceResponse, float]:
        """Return a pod's part, and when its ages were told: halfway between question and answer, as far as is known."""
        part = trace_pb2.GetTraceResponse()
        pod = self._pod(address)
        if pod is None:
            part.missing.add(pod=address, reason="its address is known no more")
            return part, 0.0
        begin = time.monotonic()
        try:
            stub: Any = trace_pb2_grpc.TraceServiceStub(pod.channel)
            part = await answer_of(stub.GetTrace(request, timeout=ASK_SECONDS, metadata=carried()))
        except grpc.aio.AioRpcError as error:
            part.missing.add(pod=address, reason=_why(error))
        except LostError as error:
            part.missing.add(pod=address, reason=str(error))
        half = (time.monotonic() - begin) / 2
        for timeline in part.timelines:
            timeline.pod, timeline.clock_error_us = address, round(1e6 * half)
        return part, begin + half

    def _pod(self, address: str) -> Pod | None:
        return next((pod for pod in self._pods() if pod.address == address), None)


def pods_of(timelines: list[Timeline]) -> list[str]:
    """Return the addresses of the pods that events name."""
    named = [event.attributes.get("pod") for timeline in timelines for event in list(timeline.events)]
    return [address for address in named if isinstance(address, str)]


def _shift(timeline: trace_pb2.Timeline, by: int) -> None:
    """Make all ages of a timeline greater, since time has passed."""
    timeline.age_us = min(timeline.age_us + by, LONGEST_US)
    if timeline.HasField("end_age_us"):
        timeline.end_age_us = min(timeline.end_age_us + by, LONGEST_US)
    for event in timeline.events:
        event.age_us = min(event.age_us + by, LONGEST_US)


def _why(error: grpc.aio.AioRpcError) -> str:
    """Say why a pod has not told its part, in our own words."""
    match error.code():
        case grpc.StatusCode.NOT_FOUND:
            return "it has nothing of this request: it was started since, or has dropped it"
        case grpc.StatusCode.UNIMPLEMENTED:
            return "it is of a version that records nothing"
        case code:
            return f"it does not answer ({code.name})"
