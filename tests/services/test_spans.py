"""OpenTelemetry: a request is one trace across the three services, and its spans agree with the client's view."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from specdec.serving.tracing.spans import SpanExporter
from specdec.v2 import generation_pb2
from tests.collector import Collector, collecting, values
from tests.services.conftest import Directories
from tests.stack import ALWAYS, Stack, long_steps, request_of, stack, until

PROMPT = [50 + i for i in range(20)]
OPTIONS: dict[str, Any] = {"max_tokens": 30, "ignore_end_token": True}
TRACE, CALLER = 16 * "ab", 8 * "cd"
METADATA = (("x-request-id", "the-request"), ("traceparent", f"00-{TRACE}-{CALLER}-01"))


@asynccontextmanager
async def traced(services: Stack, ratio: float = 1.0) -> AsyncIterator[Collector]:
    """Send the services' spans to a collector, complete when the context exits."""
    async with collecting() as (collector, address):
        exporters = []
        roles = [("orchestrator", services.orchestrator)]
        roles += [("verifier", pod.service) for pod in services.verifiers]  # type: ignore[misc]
        roles += [("draft", pod.service) for pod in services.drafts]  # type: ignore[misc]
        for role, service in roles:
            service.timelines.exporter = exporter = SpanExporter(role, address, ratio)
            exporters.append(exporter)
        yield collector
        await until(lambda: not any(service.timelines._running for _, service in roles))
        for exporter in exporters:
            await exporter.close()


def parent(span: Span) -> str:
    return span.parent_span_id.hex()


async def test_a_request_is_one_trace_below_its_caller(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        async with traced(services) as collector:
            request = generation_pb2.CompleteRequest(request=request_of(PROMPT, speculation=ALWAYS, **OPTIONS))
            answer = await services.stub.Complete(request, metadata=METADATA)
        (whole,), (verify,), (draft,) = (collector.of(role) for role in ("orchestrator", "verifier", "draft"))
    assert {span.trace_id.hex() for span in (whole, verify, draft)} == {TRACE}
    assert parent(whole) == CALLER
    assert parent(verify) == parent(draft) == whole.span_id.hex()
    assert (whole.name, verify.name, draft.name) == (f"text_completion {services.model.name}", "verify", "draft")
    assert whole.kind == Span.SPAN_KIND_SERVER
    assert whole.start_time_unix_nano < verify.start_time_unix_nano < whole.end_time_unix_nano
    finish, told = answer.completions[0].finish, values(whole.attributes)
    assert told["gen_ai.operation.name"] == "text_completion"
    assert told["gen_ai.request.model"] == services.model.name
    assert told["gen_ai.request.max_tokens"] == 30
    assert told["gen_ai.response.finish_reasons"] == ["length"]
    assert told["gen_ai.usage.input_tokens"] == finish.usage.prompt_tokens
    assert told["gen_ai.usage.output_tokens"] == finish.usage.completion_tokens
    assert (
        0 < told["gen_ai.response.time_to_first_chunk"] < 1e-9 * (whole.end_time_unix_nano - whole.start_time_unix_nano)
    )
    assert told["specdec.request_id"] == "the-request"
    assert told["specdec.rule"] == "coupled"
    assert told["specdec.accepted"] == finish.speculation.accepted
    assert [event.name for event in verify.events] == ["queued", "admitted", "prompt_computed", "finish"]
    assert "first_commit" in [event.name for event in whole.events]
    assert whole.status.code == Status.STATUS_CODE_UNSET


async def test_it_stays_one_trace_when_a_verifier_is_lost(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2, target_delay=long_steps) as services:
        async with traced(services) as collector:
            call = services.stub.Generate(request_of(PROMPT, plain=True, **OPTIONS), metadata=METADATA)
            await call.read()
            (first,) = (pod for pod in services.verifiers if pod.loop.stats.running)
            await first.stop()
            while await call.read() is not grpc.aio.EOF:
                pass
        (whole,), sessions = collector.of("orchestrator"), collector.of("verifier")
    assert [parent(session) for session in sessions] == 2 * [whole.span_id.hex()]
    assert {span.trace_id.hex() for span in (whole, *sessions)} == {TRACE}
    (failover,) = (event for event in whole.events if event.name == "failover")
    assert values(failover.attributes) == {"specdec.reason": "verifier_lost", "specdec.pod": first.address}
    assert [session.events[-1].name for session in sessions] == ["closed_by_caller", "finish"]


async def test_an_error_is_the_status_of_its_span_and_no_text_is_in_it(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        async with traced(services) as collector:
            asked = generation_pb2.GenerateRequest(text="a secret prompt", stop=["", "a secret stop"])
            with pytest.raises(grpc.aio.AioRpcError):
                await services.stub.Complete(generation_pb2.CompleteRequest(request=asked))
        (whole,) = collector.of("orchestrator")
    assert (whole.status.code, whole.status.message) == (Status.STATUS_CODE_ERROR, "INVALID_REQUEST")
    assert values(whole.attributes)["error.type"] == "INVALID_REQUEST"
    assert "secret" not in str(whole)


async def test_the_caller_decides_whether_a_trace_is_sampled_else_the_ratio(directories: Directories) -> None:
    async with stack(directories.target, None) as services, traced(services, ratio=0.0) as collector:
        for flags in ("00", "01"):
            metadata = (("x-request-id", flags), ("traceparent", f"00-{TRACE}-{CALLER}-{flags}"))
            request = generation_pb2.CompleteRequest(request=request_of(PROMPT, plain=True, **OPTIONS))
            await services.stub.Complete(request, metadata=metadata)
        await services.generate(PROMPT, plain=True, **OPTIONS)
    assert [values(span.attributes)["specdec.request_id"] for _, span in collector.spans] == ["01", "01"]
