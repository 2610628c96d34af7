"""CONTRASTIVE with partial distributions: choices are the same as with whole ones, whichever pod dies, lies or is of
the last version. `test_contrastive_bytes.py` measures the bytes that this saves."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import numpy as np
import pytest

from draft_service.request import ExpansionPolicy
from draft_service.servicer import DraftServicer
from draft_service.session import DrafterSession
from orchestrator.models.catalog import Catalog
from orchestrator.pods.pods import Pods
from orchestrator.servicer import GenerationServicer
from specdec.decoding.sampling import Contrast, Rule
from specdec.serving import checksum
from specdec.v2 import draft_pb2, generation_pb2, generation_pb2_grpc, model_pb2, verifier_pb2
from tests.hostile.lying_draft import LyingDraft, LyingSession
from tests.margins import Oracle
from tests.services.conftest import Directories
from tests.services.test_rules import CONTRASTIVE, PROMPT, TOKENS, Reference, prompts, slow_target
from tests.stack import Stack, request_of, served, stack, until
from verifier_service.backend.session_backend import BackendSession
from verifier_service.servicer import VerifierServicer


class AskedDraft(DraftServicer):
    """Keeps the queries it gets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queries: list[model_pb2.DraftQuery] = []

    def act(self, session: DrafterSession, request: draft_pb2.DraftRequest, arrived: float) -> None:
        if request.HasField("query"):
            self.queries.append(request.query)
        super().act(session, request, arrived)


class SeenVerifier(VerifierServicer):
    """Keeps the distributions it gets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: list[model_pb2.DraftDistribution] = []

    def act(self, session: BackendSession, request: verifier_pb2.VerifyRequest, arrived: float) -> None:
        self.seen += request.extend.distributions
        super().act(session, request, arrived)


class VerifierOfTheLastVersion(SeenVerifier):
    """A verifier that knows whole rows only, and no queries."""

    def opened(self, session: BackendSession) -> verifier_pb2.VerifyResponse:
        response = super().opened(session)
        response.opened.ClearField("takes_partial_distributions")
        response.opened.checksum = checksum.of_opening(response.opened)
        return response


class DraftOfTheLastVersion(AskedDraft):
    """A draft that does not know `DraftPolicy.partial_distributions`."""

    def _policy(self, message: draft_pb2.DraftPolicy, most_nodes: int, rule: Rule) -> ExpansionPolicy:
        return replace(super()._policy(message, most_nodes, rule), partial_distributions=False)


def queries(services: Stack) -> list[model_pb2.DraftQuery]:
    return [query for pod in services.drafts for query in getattr(pod.service, "queries", ())]


def seen(services: Stack) -> list[model_pb2.DraftDistribution]:
    """Return the distributions that the first verifier got."""
    service = services.verifiers[0].service
    assert isinstance(service, SeenVerifier)
    return service.seen


async def contrasted(services: Stack, prompt: list[int] = PROMPT, **fields: Any) -> generation_pb2.Completion:
    usual: dict[str, Any] = {"max_tokens": TOKENS, "ignore_end_token": True, "rule": CONTRASTIVE}
    return await services.generate(prompt, **usual | fields)


@pytest.mark.verify
@pytest.mark.parametrize("draft", ["near", "other", "random"])
async def test_600_choices_are_those_of_whole_rows(directories: Directories, draft: str) -> None:
    """Targets find few tokens plausible, or most of them; drafts expect the same tokens, or others."""
    path = getattr(directories, draft)
    ties = compared = 0
    async with stack(
        directories.target, path, target_delay=slow_target, draft_kind=AskedDraft, verifier_kind=SeenVerifier
    ) as services:
        for contrast in (Contrast(), Contrast(0.3, 0.5), Contrast(0.02), Contrast(1e-3, 2.0), Contrast(1.0)):
            reference = Reference(directories.oracle, Oracle(path), contrast)
            message = model_pb2.Contrast(alpha=contrast.alpha, amateur_temperature=contrast.amateur_temperature)
            before = len(queries(services))
            for prompt in prompts(5):
                answer = await contrasted(services, prompt, contrast=message)
                assert len(answer.tokens) == TOKENS
                ties += reference.check(prompt, list(answer.tokens))
                compared += len(answer.tokens)
            print(f"{draft}, {contrast}: {len(queries(services)) - before} queries in {5 * TOKENS} tokens")
        partial = [row for row in seen(services) if row.id_gaps]
        asked = queries(services)
    print(f"{draft}: {compared} choices, {ties} ties, {len(asked)} queries, {len(partial)} partial distributions")
    assert compared == 600
    assert ties <= 0.01 * compared
    assert partial
    assert any(row.answer for row in seen(services)) is bool(asked)
    assert asked or draft == "near"


@pytest.mark.parametrize("kind", ["verifier", "draft"])
async def test_peers_of_the_last_version_get_and_send_whole_rows(directories: Directories, kind: str) -> None:
    verifier_kind = VerifierOfTheLastVersion if kind == "verifier" else SeenVerifier
    draft_kind = DraftOfTheLastVersion if kind == "draft" else AskedDraft
    reference = Reference(directories.oracle, Oracle(directories.random), Contrast())
    async with stack(
        directories.target, directories.random, draft_kind=draft_kind, verifier_kind=verifier_kind
    ) as services:
        answer = await contrasted(services)
        assert not queries(services)
        assert seen(services)
        assert not any(row.id_gaps or row.answer for row in seen(services))
    assert len(answer.tokens) == TOKENS
    assert reference.check(PROMPT, list(answer.tokens)) <= 1


class DyingDraft(AskedDraft):
    """Its sessions end at their first query, before any answer."""

    def act(self, session: DrafterSession, request: draft_pb2.DraftRequest, arrived: float) -> None:
        super().act(session, request, arrived)
        if request.HasField("query"):
            raise RuntimeError("dead")


async def test_another_draft_answers_if_one_dies_at_a_query(directories: Directories) -> None:
    reference = Reference(directories.oracle, Oracle(directories.random), Contrast())
    kinds = iter([DyingDraft, AskedDraft])

    def either(*args: Any) -> AskedDraft:
        return next(kinds)(*args)

    async with stack(
        directories.target,
        directories.random,
        drafts=2,
        draft_kind=either,  # type: ignore[arg-type]
        failover_seconds=5.0,
    ) as services:
        answer = await contrasted(services)
        dying, other = (pod.service for pod in services.drafts)
        assert isinstance(dying, DyingDraft)
        assert isinstance(other, AskedDraft)
        assert len(dying.queries) == 1
        assert other.queries[0] == dying.queries[0]
        await until(lambda: services.idle)
    assert reference.check(PROMPT, list(answer.tokens)) <= 1


class ForgetfulDraft(AskedDraft):
    """A draft that does not answer its first query."""

    def act(self, session: DrafterSession, request: draft_pb2.DraftRequest, arrived: float) -> None:
        if request.HasField("query") and not self.queries:
            self.queries.append(request.query)
        else:
            super().act(session, request, arrived)


async def test_another_verifier_asks_for_itself(directories: Directories) -> None:
    """The first verifier stops after a query that was not answered."""
    reference = Reference(directories.oracle, Oracle(directories.random), Contrast())
    async with stack(
        directories.target, directories.random, verifiers=2, draft_kind=ForgetfulDraft, target_delay=slow_target
    ) as services:
        call = services.stub.Generate(request_of(PROMPT, max_tokens=TOKENS, ignore_end_token=True, rule=CONTRASTIVE))
        await until(lambda: bool(queries(services)))
        serving = next(pod for pod in services.verifiers if pod.loop.pool.held)
        await serving.stop()
        tokens = [token async for response in call for token in response.tokens]
        assert len(tokens) == TOKENS
        first, second, *_ = queries(services)
        assert first == second
        await until(lambda: services.idle)
    assert reference.check(PROMPT, tokens) <= 1


def row(ids: list[int], values: list[float], *, answer: bool = False) -> model_pb2.DraftDistribution:
    gaps = [after - before for before, after in zip([0, *ids], ids, strict=False)]
    packed = struct.pack(f"<{len(values)}e", *values)
    return model_pb2.DraftDistribution(id_gaps=gaps, values=packed, vocabulary_size=320, answer=answer)


Lie = Callable[[list[int]], model_pb2.DraftDistribution]

LIES: dict[str, tuple[Lie, str]] = {
    "another token": (lambda ids: row([*ids[:-1], ids[-1] + 1], [-1.0] * len(ids), answer=True), "it answers with"),
    "a token too many": (lambda ids: row([*ids, 319], [-1.0] * (len(ids) + 1), answer=True), "it answers with"),
    "the whole vocabulary": (
        lambda ids: model_pb2.DraftDistribution(values=struct.pack("<e", -1.0) * 320, answer=True),
        "it answers with the whole vocabulary",
    ),
    "probabilities above 1": (lambda ids: row(ids, [0.5] * len(ids), answer=True), "must be at most 0"),
    "no numbers": (lambda ids: row(ids, [math.nan] * len(ids), answer=True), "values: has numbers that are not finite"),
    "tokens beyond its vocabulary": (
        lambda ids: row([*ids, 320], [-1.0] * (len(ids) + 1), answer=True),
        "it has token 320, its vocabulary has 320 tokens",
    ),
    "a number too many": (lambda ids: row(ids, [-1.0] * (len(ids) + 1), answer=True), "values: has"),
}
"""Wrong answers to a query about some ids, and the reason for replacing the draft."""


@pytest.mark.parametrize("name", LIES)
async def test_a_draft_that_answers_wrongly_is_replaced(directories: Directories, name: str) -> None:
    """An honest draft replaces it immediately; the text is the same as with that one alone."""
    lie, why = LIES[name]
    lies = 0

    async def lying(session: LyingSession) -> None:
        nonlocal lies
        async for request in session.requests:
            match request.WhichOneof("message"):
                case "open":
                    await session.opened()
                    base = len(request.open.prompt_tokens) + len(request.open.generated_tokens)
                    await session.extend(model_pb2.Extend(base=base, distributions=[row([319], [-1.0])]))
                case "query":
                    lies += 1
                    ids = np.cumsum(request.query.id_gaps).tolist()
                    await session.extend(model_pb2.Extend(base=request.query.base, distributions=[lie(ids)]))

    reference = Reference(directories.oracle, Oracle(directories.near), Contrast())
    async with stack(directories.target, directories.near) as services:
        liar = LyingDraft(lying, services.verifiers[0].service.identity)
        async with served(liar) as (address, _):
            drafts = Pods([address, services.drafts[0].address])  # asked in this order
            peers = replace(services.peers, drafts=drafts)
            async with (
                served(GenerationServicer(Catalog.of(services.model, peers))) as (front, _),
                grpc.aio.insecure_channel(front) as channel,
            ):
                stub: Any = generation_pb2_grpc.GenerationServiceStub(channel)
                call = stub.Generate(request_of(PROMPT, max_tokens=TOKENS, ignore_end_token=True, rule=CONTRASTIVE))
                responses = [response async for response in call]
        found = next(pod.unfit for pod in drafts if pod.address == address)
    assert lies == 1
    assert why in str(found)
    assert responses[-1].finish.speculation.failover_events["draft_lost"] == 1
    tokens = [token for response in responses for token in response.tokens]
    assert reference.check(PROMPT, tokens) <= 1
