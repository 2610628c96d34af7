"""An OpenTelemetry collector in this process: receives spans by OTLP."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Records (service name, span)."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    async def Export(self, request: Any, context: Any) -> trace_service_pb2.ExportTraceServiceResponse:
        for of_resource in request.resource_spans:
            service = values(of_resource.resource.attributes)["service.name"]
            self.spans += [(service, span) for scope in of_resource.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def of(self, service: str) -> list[Span]:
        """Return the spans of a service, oldest first."""
        found = [span for name, span in self.spans if name == f"specdec-{service}"]
        return sorted(found, key=lambda span: span.start_time_unix_nano)


@asynccontextmanager
async def collecting() -> AsyncIterator[tuple[Collector, str]]:
    """Yield a running collector, and its address."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


def values(attributes: Any) -> dict[str, Any]:
    """Return OTLP attributes as plain values."""
    found: list[KeyValue] = list(attributes)
    return {each.key: _value(each.value) for each in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return getattr(value, kind)
