"""The trace of a request agrees with the client's view of it, on one time axis."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict

from specdec.v2 import generation_pb2, trace_pb2, trace_pb2_grpc
from tests.services.conftest import Directories
from tests.services.test_memory import Gate
from tests.stack import ALWAYS, Stack, long_steps, request_of, stack, until

PROMPT = [50 + i for i in range(20)]
OPTIONS: dict[str, Any] = {"max_tokens": 30, "ignore_end_token": True}


async def trace(services: Stack, request_id: str) -> trace_pb2.GetTraceResponse:
    async with grpc.aio.insecure_channel(services.address) as channel:
        stub: Any = trace_pb2_grpc.TraceServiceStub(channel)
        found: trace_pb2.GetTraceResponse = await stub.GetTrace(trace_pb2.GetTraceRequest(request_id=request_id))
    return found


async def trace_with(
    services: Stack, request_id: str, condition: Callable[[list[trace_pb2.Timeline]], bool]
) -> trace_pb2.GetTraceResponse:
    """Return the trace of a request once its timelines satisfy `condition`."""
    async with asyncio.timeout(10):
        while not condition(list((found := await trace(services, request_id)).timelines)):
            await asyncio.sleep(0.01)
    return found


async def ended_trace(services: Stack, request_id: str) -> dict[str, trace_pb2.Timeline]:
    """Return the timeline of each service once all have ended; the request has one timeline per service."""
    found = await trace_with(services, request_id, lambda told: all(each.HasField("end_age_us") for each in told))
    timelines = {each.service: each for each in found.timelines}
    assert len(timelines) == len(found.timelines)
    assert not found.missing
    return timelines


async def complete(services: Stack, request_id: str, **fields: Any) -> generation_pb2.CompleteResponse:
    request = generation_pb2.CompleteRequest(request=request_of(PROMPT, **fields))
    response: generation_pb2.CompleteResponse = await services.stub.Complete(
        request, metadata=(("x-request-id", request_id),)
    )
    return response


def values(told: trace_pb2.Timeline | trace_pb2.TimelineEvent) -> dict[str, Any]:
    return MessageToDict(told.attributes)


def names(timeline: trace_pb2.Timeline) -> list[str]:
    return [event.name for event in timeline.events]


async def test_a_drafted_request_is_told_from_its_beginning_to_its_end(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        (completion,) = (await complete(services, "one", speculation=ALWAYS, **OPTIONS)).completions
        told = await ended_trace(services, "one")
        orchestrator, verifier, draft = told["orchestrator"], told["verifier"], told["draft"]
        assert (verifier.pod, draft.pod) == (services.verifiers[0].address, services.drafts[0].address)
    happened = [name for name in names(orchestrator) if name not in ("draft_late", "draft_opened")]
    assert happened == ["parsed", "verifier_opened", "first_commit", "finish"]
    assert names(orchestrator).count("draft_opened") == 1
    assert names(verifier) == ["queued", "admitted", "prompt_computed", "finish"]
    assert names(draft) == ["admitted", "first_candidates", "closed_by_caller"]
    speculation, usage = completion.finish.speculation, completion.finish.usage
    figures = values(orchestrator)
    assert figures["operation"] == "text_completion"
    assert figures["max_tokens"] == 30
    assert figures["rule"] == "coupled"
    assert figures["finish_reasons"] == ["length"]
    assert (figures["prompt_tokens"], figures["generated_tokens"]) == (usage.prompt_tokens, usage.completion_tokens)
    assert (figures["steps"], figures["offered"]) == (speculation.steps, speculation.offered)
    assert figures["accepted"] == speculation.accepted == values(verifier)["accepted"]
    assert figures.get("undrafted_tokens.late", 0) == speculation.undrafted_tokens
    assert values(draft)["candidates"] >= speculation.offered
    # Times: causes precede effects, within the reported clock error.
    at = {event.name: event.age_us for event in orchestrator.events}
    queued, computed = verifier.events[0].age_us, verifier.events[2].age_us
    assert orchestrator.age_us >= queued - verifier.clock_error_us
    assert queued > computed >= at["first_commit"] - verifier.clock_error_us
    assert at["first_commit"] > at["finish"] >= orchestrator.end_age_us


async def test_samples_are_told_apart(directories: Directories) -> None:
    async with stack(directories.target, None) as services:
        completions = (await complete(services, "two", n=2, plain=True, **OPTIONS)).completions
        found = await trace(services, "two")
    orchestrator, *sessions = found.timelines
    finishes = [values(event)["sample"] for event in orchestrator.events if event.name == "finish"]
    assert sorted(finishes) == [0, 1]
    assert [session.service for session in sessions] == ["verifier", "verifier"]
    assert values(orchestrator)["steps"] == sum(each.finish.speculation.steps for each in completions)


async def test_a_failover_is_told_and_so_is_the_part_that_is_missing(directories: Directories) -> None:
    async with stack(directories.target, None, verifiers=2, target_delay=long_steps) as services:
        call = services.stub.Generate(request_of(PROMPT, plain=True, **OPTIONS), metadata=(("x-request-id", "three"),))
        await call.read()
        (first,) = (pod for pod in services.verifiers if pod.loop.stats.running)
        (other,) = (pod for pod in services.verifiers if pod is not first)
        await first.stop()
        while await call.read() is not grpc.aio.EOF:
            pass
        found = await trace(services, "three")
    orchestrator, session = found.timelines
    assert names(orchestrator) == [
        "parsed",
        "verifier_opened",
        "first_commit",
        "failover",
        "verifier_opened",
        "finish",
    ]
    assert values(orchestrator.events[3]) == {"reason": "verifier_lost", "pod": first.address}
    assert values(orchestrator)["failovers.verifier_lost"] == 1
    assert (session.service, session.pod) == ("verifier", other.address)
    assert [(each.pod, each.reason) for each in found.missing] == [
        (first.address, "it does not answer (UNAVAILABLE)"),
    ]


async def test_a_request_that_runs_or_fails_is_told_as_far_as_it_is(directories: Directories) -> None:
    gate = Gate()
    async with stack(directories.target, None, target_delay=gate) as services:
        with gate.closed():
            task = asyncio.create_task(complete(services, "four", plain=True, **OPTIONS))
            await until(lambda: services.verifier_loop.stats.running == 1)
            running = await trace_with(services, "four", lambda told: "verifier_opened" in names(told[0]))
            task.cancel()
        with pytest.raises(grpc.aio.AioRpcError):
            await complete(services, "five", model="other")
        left, failed = await ended_trace(services, "four"), await ended_trace(services, "five")
    orchestrator, session = running.timelines
    assert names(orchestrator) == ["parsed", "verifier_opened"]
    assert names(session) == ["queued", "admitted"]
    assert not orchestrator.HasField("end_age_us")
    assert not session.HasField("end_age_us")
    assert names(left["orchestrator"])[-1] == names(left["verifier"])[-1] == "closed_by_caller"
    assert (failed["orchestrator"].error, names(failed["orchestrator"])) == ("UNKNOWN_MODEL", [])
