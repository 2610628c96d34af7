"""OpenTelemetry spans: one per timeline, sent to a collector by OTLP.

Needs the extra `otel`; imported only if an endpoint is given. A slow or dead collector costs spans, never a request: a
separate thread sends them, and drops spans when too many wait.
"""

from __future__ import annotations

import asyncio
import threading
import time
import uuid

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import specdec
from specdec.serving.propagation import bind_trace_context, bound_trace_context
from specdec.serving.timeline import Timeline, Value

SEND_SECONDS = 5.0
"""Timeout in seconds of sending a batch of spans, and of flushing at shutdown."""

GEN_AI = {
    "operation": "gen_ai.operation.name",
    "model": "gen_ai.request.model",
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "samples": "gen_ai.request.choice.count",
    "stream": "gen_ai.request.stream",
    "finish_reasons": "gen_ai.response.finish_reasons",
    "time_to_first_token": "gen_ai.response.time_to_first_chunk",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "generated_tokens": "gen_ai.usage.output_tokens",
}
"""Attribute names of OpenTelemetry's conventions for generative AI. All other names are our own, `specdec.…`."""


class SpanExporter:
    """Turns timelines into spans and sends them to a collector."""

    def __init__(self, service: str, endpoint: str, ratio: float = 1.0) -> None:
        """Send spans of `specdec-<service>` to this gRPC address, without TLS. `ratio` in [0, 1] is the share of traces
        to sample if the caller has not decided."""
        resource = Resource.create(
            {
                "service.name": f"specdec-{service}",
                "service.version": specdec.__version__,
                "service.instance.id": str(uuid.uuid4()),
            }
        )
        sampler = ParentBased(TraceIdRatioBased(ratio))
        self._provider = TracerProvider(sampler=sampler, resource=resource, shutdown_on_exit=False)
        direct = (("grpc.enable_http_proxy", 0),)  # past a proxy of the environment, like all other calls
        exporter = OTLPSpanExporter(
            endpoint=endpoint,
            insecure=True,
            timeout=SEND_SECONDS,
            channel_options=direct,  # type: ignore[arg-type] # annotated too narrowly
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("specdec", specdec.__version__)
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, timeline: Timeline) -> OpenSpan:
        above = self._propagator.extract(dict(bound_trace_context()))
        begun = OpenSpan(self._tracer, timeline, above)
        context: dict[str, str] = {}
        self._propagator.inject(context, trace.set_span_in_context(begun.span))
        bind_trace_context(tuple(context.items()))
        return begun

    async def close(self) -> None:
        """Flush the remaining spans; give up after SEND_SECONDS."""
        closing = threading.Thread(target=self._provider.shutdown, name="otlp-close", daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, SEND_SECONDS)


class OpenSpan:
    """The span of a running timeline."""

    def __init__(self, tracer: trace.Tracer, timeline: Timeline, above: Context) -> None:
        self._epoch = time.time() - time.monotonic()  # when `time.monotonic` was 0
        attributes = timeline.attributes
        name = f"{attributes['operation']} {attributes['model']}" if "operation" in attributes else timeline.name
        self.span = tracer.start_span(
            name, above, kind=trace.SpanKind.SERVER, start_time=self._nanoseconds(timeline.began)
        )

    def end(self, timeline: Timeline) -> None:
        span = self.span
        if span.is_recording():  # sampled
            span.set_attributes(_request_attributes(timeline))
            for event in list(timeline.events):
                span.add_event(event.name, _attributes(event.attributes), self._nanoseconds(event.at))
            if timeline.error:
                span.set_attribute("error.type", timeline.error)
                span.set_status(trace.Status(trace.StatusCode.ERROR, timeline.error))
        assert timeline.ended is not None
        span.end(self._nanoseconds(timeline.ended))

    def _nanoseconds(self, at: float) -> int:
        return round(1e9 * (self._epoch + at))


def _request_attributes(timeline: Timeline) -> dict[str, Value]:
    """Return a span's attributes. A request's attributes have the conventions' names where these exist."""
    figures, known = dict(timeline.attributes), {}
    if "operation" in figures:
        known = {GEN_AI[key]: figures.pop(key) for key in GEN_AI if key in figures}
        known["gen_ai.provider.name"] = "specdec"
    return known | _attributes({"request_id": timeline.request_id, **figures})


def _attributes(figures: dict[str, Value]) -> dict[str, Value]:
    return {f"specdec.{key}": value for key, value in figures.items()}
