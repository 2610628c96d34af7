"""Grammars of every depth and size against every role: no process ends or grows, and other callers are served."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.grammar.compiler import KEPT_BYTES
from specdec.grammar.grammar import Grammar, Kind
from specdec.v2 import (
    draft_pb2,
    draft_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)
from testing.nested_grammars import SHAPES, nested
from tests.faults.cluster import Cluster, Models
from tests.hostile import vitals
from tests.hostile.deployment import deployed
from tests.models import END

DEPTHS = [round(16 * 2 ** (step / 2)) for step in range(15)]
"""From 16 to 2,048. The orchestrator's trial, a thread and a main thread each fail at a different depth in between."""

PROMPT = [5, 6, 7]
CALLS_AT_ONCE = 4
SECONDS = 60.0

HEAVY = 40
HEAVY_BYTES = KEPT_BYTES + (256 << 20)
"""Bytes by which a pod may grow: its cache, and the working memory of compilation."""

ANSWERS = {
    grpc.StatusCode.OK,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}


def message(grammar: Grammar) -> model_pb2.Grammar:
    if grammar.kind is Kind.CHOICE:
        return model_pb2.Grammar(choice=model_pb2.Choice(texts=grammar.source))
    found = model_pb2.Grammar()
    setattr(found, grammar.kind.value, grammar.source[0])
    return found


async def code_of(call: Any) -> grpc.StatusCode:
    """Return how a call ends; only its first response is read."""
    try:
        async with asyncio.timeout(SECONDS):
            if hasattr(call, "read"):
                await call.read()
                call.cancel()
            else:
                await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def ask_orchestrator(cluster: Cluster, grammar: model_pb2.Grammar, tenant: str) -> grpc.StatusCode:
    async with cluster.channel(cluster.of("orchestrator")[0]) as channel:
        request = generation_pb2.GenerateRequest(
            tokens=generation_pb2.TokenPrompt(ids=PROMPT), grammar=grammar, max_tokens=4, tenant=tenant
        )
        complete = generation_pb2.CompleteRequest(request=request)
        return await code_of(generation_pb2_grpc.GenerationServiceStub(channel).Complete(complete))


async def one(request: Any) -> AsyncIterator[Any]:
    """The first request of a session, which then stays open."""
    yield request
    await asyncio.sleep(SECONDS)


async def ask_pods(cluster: Cluster, grammar: model_pb2.Grammar, tenant: str) -> Sequence[grpc.StatusCode]:
    """Open a session at a verifier and a draft, as an orchestrator without a grammar trial would."""
    fields: dict[str, Any] = {
        "prompt_tokens": PROMPT,
        "max_tokens": 4,
        "end_tokens": [END],
        "grammar": grammar,
        "tenant": tenant,
    }
    sampling = model_pb2.Sampling(temperature=1.0, top_p=1.0, repetition_penalty=1.0)
    async with cluster.channel(cluster.of("verifier")[0]) as verifier, cluster.channel(cluster.of("draft")[0]) as draft:
        verifying: Any = verifier_pb2_grpc.VerifierServiceStub(verifier)
        proposing: Any = draft_pb2_grpc.DraftServiceStub(draft)
        verify = verifier_pb2.VerifyRequest(open=verifier_pb2.VerifyOpen(sampling=sampling, **fields))
        propose = draft_pb2.DraftRequest(open=draft_pb2.DraftOpen(sampling=sampling, **fields))
        return await asyncio.gather(
            code_of(verifying.Verify(one(verify))),
            code_of(proposing.Draft(one(propose))),
        )


@pytest.mark.verify
@pytest.mark.timeout(1200)
async def test_no_chain_of_any_depth_ends_a_process(models: Models, tmp_path: Path) -> None:
    codes: Counter[grpc.StatusCode] = Counter()
    room = asyncio.Semaphore(CALLS_AT_ONCE)
    async with deployed(models, tmp_path) as deployment:
        cluster = deployment.cluster

        async def attack(shape: str, depth: int) -> None:
            async with room:
                grammar = message(nested(shape, depth))
                codes.update([await ask_orchestrator(cluster, grammar, "attacker")])
                codes.update(await ask_pods(cluster, grammar, "attacker"))

        await asyncio.gather(*(attack(shape, depth) for shape in SHAPES for depth in DEPTHS))
        assert cluster.died == []
        assert codes.keys() <= ANSWERS
        assert codes[grpc.StatusCode.OK] > len(SHAPES)
        assert codes[grpc.StatusCode.INVALID_ARGUMENT] > len(SHAPES)
        good = model_pb2.Grammar(regex="[a-z]+")
        assert await ask_orchestrator(cluster, good, "another") is grpc.StatusCode.OK


@pytest.mark.verify
@pytest.mark.timeout(1200)
async def test_heavy_grammars_stay_within_their_budget(models: Models, tmp_path: Path) -> None:
    """Two tenants send them to every pod; a third tenant is served throughout."""
    async with deployed(models, tmp_path) as deployment:
        cluster = deployment.cluster
        for tenant in ("one", "two", "quiet"):
            warm = model_pb2.Grammar(regex=f"{tenant}+")
            assert await ask_orchestrator(cluster, warm, tenant) is grpc.StatusCode.OK
            await ask_pods(cluster, warm, tenant)
        before = vitals.memory(cluster)
        most = dict(before)
        for number in range(HEAVY):
            heavy = model_pb2.Grammar(json_schema=f'{{"type": "integer", "multipleOf": {99991 - number}}}')
            tenant = ("one", "two")[number % 2]
            answers = [await ask_orchestrator(cluster, heavy, tenant), *await ask_pods(cluster, heavy, tenant)]
            assert set(answers) <= ANSWERS
            quiet = model_pb2.Grammar(regex=f"[a-z]{{{number + 1}}}")
            assert await ask_orchestrator(cluster, quiet, "quiet") is grpc.StatusCode.OK
            most = {name: max(size, most[name]) for name, size in vitals.memory(cluster).items()}
        grown = {name: round(size - before[name]) for name, size in most.items()}
        print("MiB grown at most, by pod:", grown)
        assert cluster.died == []
        assert max(grown.values()) < HEAVY_BYTES >> 20


@pytest.mark.verify
@pytest.mark.timeout(600)
async def test_a_text_goes_on_elsewhere_once_its_grammar_has_passed_again(models: Models, tmp_path: Path) -> None:
    """A text's verifier is killed, and its grammar may have been the cause."""
    request = generation_pb2.GenerateRequest(
        tokens=generation_pb2.TokenPrompt(ids=PROMPT),
        grammar=model_pb2.Grammar(regex="[a-z]+(,[a-z]+)*"),
        max_tokens=200,
        min_tokens=200,
        sampling=generation_pb2.SamplingParameters(temperature=1.0, seed=1),
    )
    async with deployed(models, tmp_path) as deployment:
        cluster = deployment.cluster
        orchestrator = cluster.of("orchestrator")[0]
        async with cluster.channel(orchestrator) as channel:
            tokens: list[int] = []
            killed = False
            call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            async for response in call:
                tokens += response.tokens
                for pod in [] if killed else cluster.of("verifier"):
                    async with cluster.channel(pod) as asked:
                        stub: Any = verifier_pb2_grpc.VerifierServiceStub(asked)
                        if (await stub.GetStats(verifier_pb2.GetStatsRequest())).running:
                            pod.kill()
                            killed = True
                if response.HasField("finish"):
                    assert response.finish.speculation.failover_events["verifier_lost"] == 1
        assert killed
        assert len(tokens) == 200
        assert "grammar_tried_again" in orchestrator.log.read_text()
        assert "grammar_quarantined" not in orchestrator.log.read_text()
