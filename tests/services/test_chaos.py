"""A draft with late, duplicated, reordered or nonsensical messages costs speed and nothing else."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from orchestrator.models.catalog import Catalog
from orchestrator.servicer import GenerationServicer
from specdec.v2 import draft_pb2, draft_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2
from tests.services.conftest import Directories
from tests.services.interrupted import PROMPT, undisturbed
from tests.services.test_equality import SAMPLINGS, sampler
from tests.stack import ALWAYS, peers_at, request_of, served, stack, until

TOKENS = 60


@dataclass
class Chaos(draft_pb2_grpc.DraftServiceServicer):
    """A proxy in front of a draft, which tampers with the draft's responses."""

    draft: Any  # stub
    seed: int
    name: str = "specdec.v2.DraftService"
    tampered: int = 0
    _held: list[draft_pb2.DraftResponse] = field(default_factory=list)

    def register(self, server: grpc.aio.Server) -> None:
        draft_pb2_grpc.add_DraftServiceServicer_to_server(self, server)

    async def close(self) -> None:
        pass

    async def GetStats(
        self, request: draft_pb2.DraftServiceGetStatsRequest, context: Any
    ) -> draft_pb2.DraftServiceGetStatsResponse:
        return draft_pb2.DraftServiceGetStatsResponse()

    async def Draft(self, request_iterator: AsyncIterator[Any], context: Any) -> None:  # type: ignore[override]
        generator = random.Random(self.seed)
        call = self.draft.Draft()

        async def forward() -> None:
            async for request in request_iterator:
                await call.write(request)

        forwarding = asyncio.create_task(forward())
        try:
            async for response in call:
                for changed in self.change(response, generator):
                    await context.write(changed)
        finally:
            forwarding.cancel()
            call.cancel()

    def change(self, response: draft_pb2.DraftResponse, generator: random.Random) -> list[draft_pb2.DraftResponse]:
        """Return the responses to send instead."""
        if not response.HasField("extend"):
            return [response]
        self.tampered += 1
        match generator.randrange(6):
            case 0:
                return [response, response]
            case 1:
                self._held.append(response)  # to be sent later
                return []
            case 2:
                held, self._held = self._held, []
                generator.shuffle(held)
                return [*held, response]
            case 3:
                return [corrupted(response, generator)]
            case 4:
                return [corrupted(response, generator), response]
            case _:
                return [response]


def corrupted(response: draft_pb2.DraftResponse, generator: random.Random) -> draft_pb2.DraftResponse:
    extend = model_pb2.Extend()
    extend.CopyFrom(response.extend)
    at = generator.randrange(len(extend.tokens)) if extend.tokens else None
    match generator.randrange(8):
        case 0:
            extend.base = generator.choice((0, 1, extend.base + 3, 2**31))
        case 1 if at is not None:
            extend.tokens[at] = generator.choice((0, 2, 77, 10_000, 2**32 - 1))
        case 2 if at is not None:
            extend.parents[at] = generator.choice((0, at, at + 1, 2**32 - 1))
        case 3 if at is not None:
            extend.logprob_bytes = generator.randbytes(len(extend.tokens))
        case 4 if at is not None:
            extend.logprob_bytes = extend.logprob_bytes[:at]
        case 5:
            extend.distributions.add(parent=generator.choice((0, 1, 2**32 - 1)), ids=[3, 2], values=b"abc")
        case 6 if at is not None:
            extend.tokens[:] = generator.choices(range(256), k=len(extend.tokens))
        case _:
            extend.Clear()
    return draft_pb2.DraftResponse(extend=extend)


async def check(directories: Directories, seeds: range, samplings: list[dict[str, Any]]) -> None:
    tampered = accepted = 0
    fields: dict[str, Any] = {"max_tokens": TOKENS, "ignore_end_token": True}
    wanted = [await undisturbed(directories, sampling=sampling, **fields) for sampling in samplings]
    async with (
        stack(directories.target, directories.near, target_delay=lambda: time.sleep(0.015)) as services,
        grpc.aio.insecure_channel(services.drafts[0].address) as to_draft,
        served(chaos := Chaos(draft_pb2_grpc.DraftServiceStub(to_draft), 0)) as (address, _),
        served(GenerationServicer(Catalog.of(services.model, peers_at(services, address)))) as (front, _),
        grpc.aio.insecure_channel(front) as to_front,
    ):
        stub: Any = generation_pb2_grpc.GenerationServiceStub(to_front)
        for sampling, want in zip(samplings, wanted, strict=True):
            for chaos.seed in seeds:
                request = request_of(PROMPT, sampling=sampling, speculation=ALWAYS, **fields)
                answer = await stub.Complete(generation_pb2.CompleteRequest(request=request))
                (got,) = answer.completions
                directories.oracle.same(PROMPT, list(want.tokens), list(got.tokens), sampler(sampling), "tampered with")
                accepted += got.finish.speculation.accepted
        tampered = chaos.tampered
        await until(lambda: services.verifier_loop.pool.held == 0)
    assert tampered > 10 * len(seeds)
    assert accepted > TOKENS * len(seeds) * len(samplings) / 20  # an occasionally wrong draft is still useful


async def test_tokens_survive_a_draft_gone_mad(directories: Directories) -> None:
    await check(directories, range(2), [SAMPLINGS[0], SAMPLINGS[5]])


@pytest.mark.verify
async def test_tokens_survive_a_draft_gone_mad_for_long(directories: Directories) -> None:
    await check(directories, range(40), SAMPLINGS)
