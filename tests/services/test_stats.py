"""Statistics of the three services agree with what clients saw."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import grpc
import pytest

import specdec
from specdec.engine import fast_paths
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, verifier_pb2, verifier_pb2_grpc
from tests.services.conftest import Directories
from tests.services.test_memory import Gate
from tests.stack import ALWAYS, CAPACITY, Stack, long_steps, request_of, stack, until
from verifier_service.servicer import VerifierServicer

PROMPT = [50 + i for i in range(20)]
OPTIONS: dict[str, Any] = {"max_tokens": 30, "ignore_end_token": True}


async def of_orchestrator(services: Stack) -> generation_pb2.GenerationServiceGetStatsResponse:
    found: generation_pb2.GenerationServiceGetStatsResponse = await services.stub.GetStats(
        generation_pb2.GenerationServiceGetStatsRequest()
    )
    return found


async def of_verifier(services: Stack) -> verifier_pb2.GetStatsResponse:
    async with grpc.aio.insecure_channel(services.verifiers[0].address) as channel:
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        found: verifier_pb2.GetStatsResponse = await stub.GetStats(verifier_pb2.GetStatsRequest())
    return found


async def of_draft(services: Stack) -> draft_pb2.DraftServiceGetStatsResponse:
    async with grpc.aio.insecure_channel(services.drafts[0].address) as channel:
        stub: Any = draft_pb2_grpc.DraftServiceStub(channel)
        found: draft_pb2.DraftServiceGetStatsResponse = await stub.GetStats(draft_pb2.DraftServiceGetStatsRequest())
    return found


async def test_each_service_says_who_it_is(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        orchestrator, verifier, draft = (
            await of_orchestrator(services),
            await of_verifier(services),
            await of_draft(services),
        )
        models = (await services.stub.ListModels(generation_pb2.ListModelsRequest())).models
        identity = services.verifiers[0].service.identity
    for stats in (orchestrator, verifier, draft):
        assert (stats.pod.version, stats.pod.process_id) == (specdec.__version__, os.getpid())
        assert stats.up_us > 0
    for pod in (verifier.pod, draft.pod):
        assert (pod.device, pod.dtype, list(pod.threads)) == ("cpu", "float32", [1])
    assert verifier.serving
    assert draft.serving
    assert verifier.identity == identity
    assert draft.identity.model == "near"
    assert (verifier.max_sessions, verifier.max_waiting, draft.max_sessions) == (512, 128, 256)
    assert draft.kv_tokens == CAPACITY - 1
    assert list(orchestrator.models) == list(models)


class CountingVerifier(VerifierServicer):
    """Counts how often it is asked for statistics."""

    asked = 0

    async def GetStats(self, request: Any, context: Any) -> verifier_pb2.GetStatsResponse:
        type(self).asked += 1
        return await super().GetStats(request, context)


async def test_the_orchestrator_asks_its_pods_on_request(directories: Directories) -> None:
    """Once for many callers; a pod that does not answer is shown without statistics."""
    request = generation_pb2.GenerationServiceGetStatsRequest(pods=True)
    async with stack(directories.target, directories.near, verifier_kind=CountingVerifier) as services:
        without, before = await of_orchestrator(services), CountingVerifier.asked
        told = await asyncio.gather(*(services.stub.GetStats(request) for _ in range(20)))
        assert CountingVerifier.asked == before + 1
        stats, own, draft = told[0], await of_verifier(services), await of_draft(services)
        await services.drafts[0].stop()
        async with asyncio.timeout(10):
            while (await services.stub.GetStats(request)).drafts[0].HasField("draft"):
                await asyncio.sleep(0.05)
    assert [pod.WhichOneof("stats") for pod in (*without.verifiers, *without.drafts)] == [None, None]
    assert stats.verifiers[0].verifier.identity == own.identity
    assert stats.verifiers[0].verifier.kv_tokens == own.kv_tokens > 0
    assert stats.drafts[0].draft.identity == draft.identity
    assert [pod.address for pod in stats.drafts] == [services.drafts[0].address]


async def test_the_orchestrator_counts_what_clients_were_told(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        first = await services.complete(PROMPT, n=2, speculation=ALWAYS, **OPTIONS)
        resumed = await services.complete(PROMPT, generated_tokens=[70, 71], sampling={"seed": 1}, **OPTIONS)
        stats = await of_orchestrator(services)
    finishes = [each.finish for answer in (first, resumed) for each in answer.completions]
    assert (stats.requests, stats.running_requests, stats.running_samples, stats.ended_samples) == (2, 0, 0, 3)
    assert stats.generated_tokens == 30 + 30 + 28 == sum(f.usage.completion_tokens for f in finishes) - 2
    assert stats.prompt_tokens == 3 * len(PROMPT)
    assert stats.cached_tokens == sum(f.usage.cached_tokens for f in finishes)
    assert stats.steps == sum(f.speculation.steps for f in finishes)
    assert stats.offered_candidates == sum(f.speculation.offered for f in finishes)
    assert stats.accepted_candidates == sum(f.speculation.accepted for f in finishes) > 0
    for reason in {reason for f in finishes for reason in f.speculation.failover_events}:
        assert stats.failover_events[reason] == sum(f.speculation.failover_events[reason] for f in finishes)


async def test_the_draft_counts_what_it_sends_and_what_comes_true(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        before = await of_draft(services)
        finish = (await services.generate(PROMPT, speculation=ALWAYS, **OPTIONS)).finish
        await until(lambda: services.idle)
        stats = await of_draft(services)
    assert (before.steps, before.sent_candidates, before.committed_tokens) == (0, 0, 0)
    assert finish.speculation.accepted <= stats.guessed_tokens <= stats.committed_tokens <= 30
    assert finish.speculation.offered <= stats.sent_candidates
    assert 0 < stats.sent_messages <= stats.sent_candidates
    assert 0 < stats.busy_us <= stats.up_us
    assert (stats.sessions, stats.kv_held_tokens) == (0, 0)
    assert stats.steps > 0


async def test_requests_that_run_are_told_and_those_that_are_given_up(directories: Directories) -> None:
    """They are counted while a step is held in progress."""
    gate = Gate()
    async with stack(directories.target, None, target_delay=gate) as services:
        with gate.closed():
            task = asyncio.create_task(services.generate(PROMPT, **OPTIONS))
            await until(lambda: services.verifier_loop.stats.running == 1)
            stats, pod = await of_orchestrator(services), await of_verifier(services)
            assert (stats.running_requests, stats.running_samples, stats.ended_samples) == (1, 1, 0)
            assert [view.sessions for view in stats.verifiers] == [1]
            assert (pod.sessions, pod.running, pod.waiting, pod.throttled) == (1, 1, 0, 0)
            task.cancel()
            async with asyncio.timeout(10):
                while (stats := await of_orchestrator(services)).running_samples:
                    await asyncio.sleep(0.01)
        assert (stats.requests, stats.running_requests, stats.cancelled_requests) == (1, 0, 1)
        assert dict(stats.failed_requests) == {}


async def test_failures_and_lost_pods_are_told(directories: Directories) -> None:
    async with stack(directories.target, directories.foreign, failover_seconds=0.3) as services:
        with pytest.raises(grpc.aio.AioRpcError):
            await services.stub.Complete(
                generation_pb2.CompleteRequest(request=request_of(PROMPT, max_tokens=1, model="other"))
            )
        await services.generate(PROMPT, speculation=ALWAYS, **OPTIONS)
        (draft,) = (await of_orchestrator(services)).drafts
        (pod,) = services.verifiers
        await pod.stop()
        with pytest.raises(grpc.aio.AioRpcError):
            await services.generate(PROMPT, **OPTIONS)
        stats = await of_orchestrator(services)
        await pod.start()
    assert (draft.unfit_reason, draft.address) == ("tokenizer_mismatch", services.drafts[0].address)
    assert dict(stats.failed_requests) == {"UNKNOWN_MODEL": 1, "VERIFIER_LOST": 1}
    (view,) = stats.verifiers
    assert view.address == pod.address
    assert view.breaker in (generation_pb2.BREAKER_STATE_OPEN, generation_pb2.BREAKER_STATE_HALF_OPEN)
    assert view.numerics_fingerprint == pod.service.identity.numerics_fingerprint


async def test_fast_paths_that_are_off_are_told(directories: Directories) -> None:
    """The verifier and the draft report one line each."""
    fast_paths.found_off("test", "it is off here", "it costs nothing")
    try:
        async with stack(directories.target, directories.near) as services:
            told = [(await of_verifier(services)).fast_paths_off, (await of_draft(services)).fast_paths_off]
    finally:
        fast_paths._settled.pop("test")
    for lines in told:
        assert "test: off, it is off here; it costs nothing" in lines
