"""Any backend can serve the Verify protocol: here one that counts, without a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import pytest

from specdec.decoding.speculation import Outlook
from specdec.decoding.tree import Paths
from specdec.serving.response_queue import ResponseQueue
from specdec.serving.timeline import Timeline
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc
from tests.stack import served
from verifier_service.backend.request import Policy, VerifierSessionRequest
from verifier_service.backend.result import LENGTH, PLAIN, CommitDetails, VerifyResult
from verifier_service.backend.session_backend import MemoryUse, ResponseMaker, SessionBackend
from verifier_service.backend.stats import VerifierStats
from verifier_service.servicer import VerifierLimits, VerifierServicer

VOCABULARY, CONTEXT = 100, 64


class Count:
    """A session whose next token is always the next number."""

    def __init__(self, request: VerifierSessionRequest, policy: Policy) -> None:
        self.request, self.policy = request, policy
        self.text = [*request.prompt, *request.generated]
        self.refused_extends = 0
        self.awaits_draft = False
        self.read = 0
        self.candidates: list[list[int]] = []
        self.responses: ResponseQueue[Any] | None = None
        self.response_maker = ResponseMaker()

    def extend(self, base: int, paths: Paths, arrived: float, base_age: float) -> None:
        self.candidates.append(list(paths.tokens))

    def set_policy(self, policy: Policy) -> None:
        self.policy = policy

    def client_has_read(self, tokens: int, scored: int) -> None:
        self.read = tokens


class Counting(SessionBackend):
    """Emits one number per turn, once the client has read the previous one."""

    context = CONTEXT

    def __init__(self) -> None:
        super().__init__("counting")
        self.stats = VerifierStats()
        self.running: list[Count] = []
        self.ended: list[Count] = []

    def session(self, request: VerifierSessionRequest, policy: Policy, max_nodes: int, vocabulary: int) -> Count:
        return Count(request, policy)

    def serve(
        self, session: Count, responses: ResponseQueue[Any], response_maker: ResponseMaker, timeline: Timeline
    ) -> None:
        session.responses, session.response_maker = responses, response_maker
        self.running.append(session)

    def detach(self, session: Count) -> None:
        if session in self.running:
            self.running.remove(session)
            self.ended.append(session)

    def outlook(self, session: Count, sessions: int) -> Outlook:
        return Outlook(drafting_wanted=True, break_even=0.25)

    def memory(self) -> MemoryUse:
        return MemoryUse(1000, 10 * len(self.running), 0)

    def known_prefix(self, hashes: Iterable[int]) -> int:
        return 0

    def fitting(self, tokens: float) -> int:
        return 10

    def turn(self) -> float | None:
        for session in self.running:
            said = len(session.text) - len(session.request.prompt)
            if said == session.request.max_tokens or session.read < said:
                continue
            token = session.text[-1] + 1
            finish = LENGTH if said + 1 == session.request.max_tokens else 0
            result = VerifyResult(len(session.text), 0, [token], [PLAIN], finish=finish)
            session.text.append(token)
            assert session.responses is not None
            session.responses.send(session.response_maker.commit(result, CommitDetails(0.0, 0.0, 0.0, 0.0)))
        return None


@pytest.mark.asyncio
async def test_a_backend_without_a_model_serves_the_verify_protocol() -> None:
    backend = Counting()
    backend.start()
    identity = model_pb2.ModelIdentity(model="count", vocabulary_size=VOCABULARY, context_tokens=CONTEXT)
    sent: asyncio.Queue[verifier_pb2.VerifyRequest] = asyncio.Queue()

    async def requests() -> AsyncIterator[verifier_pb2.VerifyRequest]:
        while True:
            yield await sent.get()

    async with (
        served(VerifierServicer(backend, identity, VerifierLimits())) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        stub: Any = verifier_pb2_grpc.VerifierServiceStub(channel)
        policy = verifier_pb2.VerifyPolicy(drafters=[model_pb2.DRAFTER_REMOTE], patience_us=1000, max_candidates=5)
        opening = verifier_pb2.VerifyOpen(prompt_tokens=[5, 6], max_tokens=3, policy=policy)
        sent.put_nowait(verifier_pb2.VerifyRequest(open=opening))
        call = stub.Verify(requests())
        opened = (await call.read()).opened
        assert (opened.identity.model, opened.drafting_wanted, opened.max_candidates) == ("count", True, 5)
        assert opened.min_candidate_probability == 0.25
        extend = model_pb2.Extend(base=2, tokens=[9, 8], parents=[0, 1], logprob_bytes=b"\1\1")
        sent.put_nowait(verifier_pb2.VerifyRequest(extend=extend))
        sent.put_nowait(verifier_pb2.VerifyRequest(policy=verifier_pb2.VerifyPolicy()))
        tokens: list[int] = []
        while True:
            response = await call.read()
            if response.WhichOneof("message") == "heartbeat":
                continue
            tokens += response.commit.committed.tokens
            if response.commit.finish_reason:
                break
            consumed = verifier_pb2.Consumed(tokens=len(tokens))
            sent.put_nowait(verifier_pb2.VerifyRequest(consumed=consumed))
        assert tokens == [7, 8, 9]
        stats = await stub.GetStats(verifier_pb2.GetStatsRequest())
        assert (stats.kv_tokens, stats.kv_held_tokens) == (1000, 10)
        call.cancel()
        while not backend.ended:
            await backend.caught_up()
    (session,) = backend.ended
    assert session.candidates == [[9, 8]]
    assert not session.policy.drafters
