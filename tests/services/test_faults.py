"""A client, draft or verifier goes away, or there is no room."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection

from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.client.errors import from_rpc
from specdec.decoding.noise import sample_seed
from specdec.decoding.query import RequestSampler
from specdec.decoding.sampling import Sampling
from specdec.engine.model_directory import ModelDirectory
from specdec.serving.identity import identity_of
from specdec.serving.interceptor import CallInterceptor
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import PROMPT, slow_target, undisturbed
from tests.stack import ALWAYS, peers_at, request_of, served, stack, until


async def rest_of(call: Any) -> list[generation_pb2.GenerateResponse]:
    """Return the rest of a partly read stream."""
    responses = []
    while (response := await call.read()) is not grpc.aio.EOF:
        responses.append(response)
    return responses


async def test_a_cancelled_request_frees_both_sessions(directories: Directories) -> None:
    slow: dict[str, Any] = {"delay": slow_target, "target_delay": slow_target}
    async with stack(directories.target, directories.near, **slow) as services:
        request = request_of(PROMPT, max_tokens=250, ignore_end_token=True, speculation=ALWAYS)
        call = services.stub.Generate(request)
        assert await call.read()
        await until(lambda: services.verifier_loop.pool.held > 0 and services.draft_slots_used > 0)
        call.cancel()
        await until(lambda: services.verifier_loop.pool.held == 0 and services.draft_slots_used == 0)


async def test_a_deadline_frees_both_sessions(directories: Directories) -> None:
    async with stack(directories.target, directories.near, target_delay=lambda: time.sleep(0.05)) as services:
        asked = request_of(PROMPT, max_tokens=250, ignore_end_token=True, speculation=ALWAYS)
        call = services.stub.Complete(generation_pb2.CompleteRequest(request=asked), timeout=1.0)
        await until(lambda: services.verifier_loop.pool.held > 0 and services.draft_slots_used > 0)
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await call
        assert late.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: services.verifier_loop.pool.held == 0 and services.draft_slots_used == 0)


async def test_a_draft_killed_mid_stream_costs_no_token(directories: Directories) -> None:
    fields = {"sampling": {"temperature": 0.7, "seed": 4}, "max_tokens": 120, "ignore_end_token": True}
    want = await undisturbed(directories, **fields)
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        assert services.draft_server is not None
        call = services.stub.Generate(request_of(PROMPT, speculation=ALWAYS, **fields))
        responses: list[generation_pb2.GenerateResponse] = [await call.read()]
        while model_pb2.TOKEN_SOURCE_REMOTE_DRAFT not in responses[-1].sources:
            responses.append(await call.read())
        await services.draft_server.stop(None)
        responses += await rest_of(call)
        got = [t for r in responses for t in r.tokens]
        sampler = RequestSampler(Sampling(temperature=0.7, seed=sample_seed(4, 0)))
        directories.oracle.same(PROMPT, list(want.tokens), got, sampler)
        speculation = responses[-1].finish.speculation
        assert speculation.accepted > 0
        assert speculation.undrafted_reason == "draft_lost"
        # Forced: requests a draft whether or not it pays.
        forced = generation_pb2.Speculation(drafters=[model_pb2.DRAFTER_REMOTE], forced=True)
        after = await services.generate(PROMPT, **(fields | {"max_tokens": 20}), speculation=forced)
        assert after.finish.speculation.undrafted_reason == "no_draft"
        assert after.finish.speculation.sources["remote_draft"] == 0
        assert len(after.tokens) == 20


async def test_a_draft_with_another_tokenizer_is_not_used(directories: Directories) -> None:
    async with stack(directories.target, directories.foreign) as services:
        completion = await services.generate(PROMPT, max_tokens=20, speculation=ALWAYS)
        assert completion.finish.speculation.undrafted_reason == "tokenizer_mismatch"
        assert completion.finish.speculation.sources["remote_draft"] == 0
        await until(lambda: services.draft_slots_used == 0)


async def test_a_verifier_killed_mid_stream_is_unavailable(directories: Directories) -> None:
    async with stack(directories.target, directories.near, failover_seconds=0.5) as services:
        call = services.stub.Generate(request_of(PROMPT, max_tokens=250, ignore_end_token=True))
        assert await call.read()
        await services.verifier_server.stop(None)
        with pytest.raises(grpc.aio.AioRpcError) as lost:
            await rest_of(call)
        assert lost.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "verifier" in str(lost.value.details())


async def test_a_small_memory_is_a_small_context(directories: Directories) -> None:
    async with stack(directories.target, None, capacity=200) as services:
        room = services.verifier_loop.context
        assert room < 200
        most = await services.generate(PROMPT, max_tokens=250, ignore_end_token=True)
        assert len(most.tokens) == room - len(PROMPT)
        assert most.finish.reason == model_pb2.FINISH_REASON_CONTEXT
        with pytest.raises(grpc.aio.AioRpcError, match=f"the context is {room}") as never:
            await services.generate([5] * room, max_tokens=1)
        assert never.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        ((field, _),) = from_rpc(never.value).violations  # found by the verifier
        assert field == "prompt"  # as named in the client's request


async def test_a_client_that_does_not_read_stalls_only_itself(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        lazy = services.stub.Generate(request_of(PROMPT, max_tokens=240, ignore_end_token=True))
        assert await lazy.read()
        prompt = await services.generate(PROMPT, max_tokens=50, ignore_end_token=True)
        assert len(prompt.tokens) == 50
        rest = await rest_of(lazy)
        assert rest[-1].finish.usage.completion_tokens == 240


async def test_a_draft_that_falls_silent_is_given_up(directories: Directories) -> None:
    """The draft keeps reading and sends nothing."""

    class NoEngine:
        numerics = "none"
        exact = False

    class Silent(draft_pb2_grpc.DraftServiceServicer):
        name = "specdec.v2.DraftService"

        def register(self, server: grpc.aio.Server) -> None:
            draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

        async def close(self) -> None:
            pass

        async def GetStats(
            self, request: draft_pb2.DraftServiceGetStatsRequest, context: Any
        ) -> draft_pb2.DraftServiceGetStatsResponse:
            return draft_pb2.DraftServiceGetStatsResponse()

        async def Draft(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
            identity = identity_of(ModelDirectory(directories.target), NoEngine(), 256)  # type: ignore[arg-type]
            await context.write(draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(identity=identity)))
            await asyncio.Event().wait()

    async with (
        stack(directories.target, None, target_delay=slow_target) as services,
        served(Silent()) as (address, _),
    ):
        peers = replace(peers_at(services, address), silence_seconds=0.4)
        async with (
            served(GenerationServicer(Catalog.of(services.model, peers))) as (front, _),
            grpc.aio.insecure_channel(front) as to_front,
        ):
            stub: Any = generation_pb2_grpc.GenerationServiceStub(to_front)
            request = request_of(PROMPT, max_tokens=150, ignore_end_token=True, speculation=ALWAYS)
            answer = await stub.Complete(generation_pb2.CompleteRequest(request=request))
    (completion,) = answer.completions
    assert len(completion.tokens) == 150
    assert completion.finish.speculation.undrafted_reason == "draft_lost"


async def test_a_cancelled_request_for_several_samples_leaves_nothing(directories: Directories) -> None:
    async with stack(directories.target, directories.near) as services:
        await services.generate(PROMPT, max_tokens=50, ignore_end_token=True)  # connected to all pods
        before = len(asyncio.all_tasks())
        call = services.stub.Generate(request_of(PROMPT, max_tokens=200, n=4, ignore_end_token=True))
        assert await call.read()
        call.cancel()
        await until(lambda: services.verifier_loop.pool.held == 0)
        await until(lambda: len(asyncio.all_tasks()) <= before)


async def test_the_services_can_be_listed(directories: Directories) -> None:
    """Health and reflection work with operators' tools."""
    from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

    server = grpc.aio.server(interceptors=[CallInterceptor()])
    reflection.enable_server_reflection(("specdec.v2.GenerationService",), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        answers = [answer async for answer in call]
    await server.stop(None)
    (answer,) = answers
    assert [service.name for service in answer.list_services_response.service] == ["specdec.v2.GenerationService"]
