"""Spans: names follow OpenTelemetry's conventions; disabled, they cost nothing; an unavailable collector delays no
request."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE

from specdec.serving.process.server import ServerSettings, span_exporter
from specdec.serving.propagation import bind_metadata
from specdec.serving.timeline import Timelines
from specdec.serving.tracing import spans
from specdec.serving.tracing.spans import GEN_AI, SpanExporter
from specdec.wire.address import Address
from tests.collector import collecting, values


def test_names_are_those_of_the_conventions() -> None:
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    assert {*GEN_AI.values(), "gen_ai.provider.name"} <= known
    assert ERROR_TYPE == "error.type"


def test_nothing_is_imported_where_nothing_is_asked_for() -> None:
    services = "orchestrator.__main__, draft_service.__main__"
    script = f"import sys, {services}; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=100)
    assert done.stdout == "[]\n"


async def test_a_service_sends_spans_where_it_is_told_to() -> None:
    assert span_exporter(ServerSettings(), "draft") is None
    async with collecting() as (collector, address):
        timelines = Timelines()
        timelines.exporter = exporter = span_exporter(ServerSettings(otlp_endpoint=Address.parse(address)), "draft")
        bind_metadata({"x-request-id": "r"})
        with timelines.begin("draft") as timeline:
            timeline.event("admitted")
        assert exporter is not None
        await exporter.close()
    (span,) = collector.of("draft")
    assert (span.name, [event.name for event in span.events]) == ("draft", ["admitted"])
    assert values(span.attributes) == {"specdec.request_id": "r"}
    assert span.trace_id.hex() == timeline.trace_id
    # Times are wall-clock times, converted from another clock.
    assert abs(span.start_time_unix_nano / 1e9 - time.time()) < 60
    assert span.start_time_unix_nano <= span.events[0].time_unix_nano <= span.end_time_unix_nano


async def test_spans_go_past_a_proxy_of_the_environment(unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{unused_tcp_port}")
    for name in ("no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with collecting() as (collector, address):
        timelines = Timelines()
        timelines.exporter = exporter = SpanExporter("draft", address)
        with timelines.begin("draft"):
            pass
        await exporter.close()
    assert len(collector.of("draft")) == 1


async def test_a_collector_that_does_not_answer_holds_up_no_end(
    unused_tcp_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spans, "SEND_SECONDS", 0.5)
    exporter = SpanExporter("draft", f"127.0.0.1:{unused_tcp_port}")
    timelines = Timelines()
    timelines.exporter = exporter
    with timelines.begin("draft"):
        pass
    async with asyncio.timeout(10):
        await exporter.close()
