"""Drafts killed, restarted or useless in mid-stream: the text goes on without them, or with another."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc

from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.serving.messages import logprobs_message
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import (
    ALWAYS,
    CONTRASTIVE,
    GENEROUS,
    PROMPT,
    WARM,
    Reader,
    changes,
    drafted,
    drafting,
    same,
    sampler,
    serving,
    slow_target,
    undisturbed,
)
from tests.stack import long_steps, peers_at, request_of, served, stack, until


async def test_a_killed_draft_is_replaced(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 150, "ignore_end_token": True, "sampling": WARM, "speculation": ALWAYS}
    want = await undisturbed(directories, **fields)
    async with stack(directories.target, directories.near, drafts=2, target_delay=slow_target) as services:
        reader = Reader(services, **fields)
        await reader.read(20)
        await services.drafts[drafting(services)].stop()
        await reader.read(40)
        await until(lambda: any(pod.drafter.slots_used for pod in services.drafts), GENEROUS)
        got = await reader.rest()
        same(directories, want, got, WARM)
        s = got.finish.speculation
        assert changes(s) == {"draft_lost": 1}
        assert s.undrafted_reason in ("", "late")
        assert drafted(reader.responses[-20:])


async def test_a_draft_comes_back_to_a_long_text(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 240, "ignore_end_token": True, "sampling": WARM, "speculation": ALWAYS}
    async with stack(directories.target, directories.near, target_delay=long_steps) as services:
        reader = Reader(services, **fields)
        await reader.read(20)
        (draft,) = services.drafts
        await draft.stop()
        await until(lambda: not draft.drafter.slots_used)
        await draft.start()
        got = await reader.rest()
        assert len(got.tokens) == 240
        s = got.finish.speculation
        assert (s.failover_events["draft_lost"], s.failover_events["draft_back"]) == (1, 1)
        assert s.undrafted_reason == "draft_lost"
        assert drafted(reader.responses[-20:])


class Wrong(draft_pb2_grpc.DraftServiceServicer):
    """A draft that answers every commit with the same token."""

    name = "specdec.v2.DraftService"

    def __init__(self, identity: model_pb2.ModelIdentity, token: int) -> None:
        self._identity = identity
        self._token = token

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def close(self) -> None:
        pass

    async def GetStats(
        self, request: draft_pb2.DraftServiceGetStatsRequest, context: Any
    ) -> draft_pb2.DraftServiceGetStatsResponse:
        return draft_pb2.DraftServiceGetStatsResponse()

    async def Draft(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]
        await context.write(draft_pb2.DraftResponse(opened=draft_pb2.DraftOpened(identity=self._identity)))
        async for request in request_iterator:
            text = request.committed
            if request.HasField("open"):
                base = len(request.open.prompt_tokens) + len(request.open.generated_tokens)
            elif text.tokens:
                base = text.base + len(text.tokens)
            extend = model_pb2.Extend(
                base=base, tokens=[self._token], parents=[0], logprob_bytes=logprobs_message([-0.1])
            )
            await context.write(draft_pb2.DraftResponse(extend=extend))


async def test_a_useless_draft_is_left_alone(directories: Directories) -> None:
    """It may be useless for this text only: however many such texts there are, the pod stays in use."""
    fields: dict[str, Any] = {"max_tokens": 200, "ignore_end_token": True}
    want = await undisturbed(directories, **fields)
    token = next(token for token in range(3, 256) if token not in want.tokens)
    async with stack(directories.target, None, target_delay=slow_target) as services:
        draft = Wrong(services.verifiers[0].service.identity, token)
        async with served(draft) as (address, _):
            peers = peers_at(services, address)
            assert peers.drafts is not None
            (pod,) = peers.drafts
            async with (
                served(GenerationServicer(Catalog.of(services.model, peers))) as (front, _),
                grpc.aio.insecure_channel(front) as channel,
            ):
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                request = generation_pb2.CompleteRequest(request=request_of(PROMPT, speculation=ALWAYS, **fields))
                for answer in await asyncio.gather(*(stub.Complete(request) for _ in range(4))):
                    (got,) = answer.completions
                    directories.oracle.same(PROMPT, list(want.tokens), list(got.tokens), sampler({}))
                    assert got.finish.speculation.failover_events["draft_useless"] == 1
                    assert got.finish.speculation.undrafted_reason == "draft_useless"
                assert pod.breaker.state == "closed"


async def test_contrast_goes_on_with_another_draft(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 60, "ignore_end_token": True, "rule": CONTRASTIVE}
    async with stack(directories.target, directories.near, verifiers=2, drafts=2, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(10)
        await services.drafts[drafting(services)].stop()
        await reader.read(25)
        await services.verifiers[serving(services)].stop()
        got = await reader.rest()
        assert list(got.tokens) == list(want.tokens)
        assert changes(got.finish.speculation) == {"draft_lost": 1, "verifier_lost": 1}
        await until(lambda: services.idle)


async def test_contrast_waits_for_a_draft_to_return(directories: Directories) -> None:
    fields: dict[str, Any] = {"max_tokens": 25, "ignore_end_token": True, "rule": CONTRASTIVE}
    async with stack(directories.target, directories.near, target_delay=slow_target) as services:
        want = await services.generate(PROMPT, **dict(fields))
        reader = Reader(services, **fields)
        await reader.read(10)
        (draft,) = services.drafts
        await draft.stop()
        await until(lambda: not draft.drafter.slots_used)
        await draft.start()
        got = await reader.rest()
        assert list(got.tokens) == list(want.tokens)
