"""Verifiers that refuse a text, and those that lose it before its first token."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import pytest
from hypothesis import given as for_all
from hypothesis import strategies as st

from orchestrator.generation import peer_stream
from orchestrator.generation.peer_stream import MAX_HEARTBEATS, PeerStream
from orchestrator.generation.verification import Verification
from orchestrator.pods import backoff
from orchestrator.pods.errors import LostError
from orchestrator.pods.peers import Peers
from orchestrator.pods.pods import Pods
from specdec.decoding.sampling import Sampling
from specdec.serving import checksum
from specdec.serving.errors import (
    GrammarPendingError,
    InvalidRequestError,
    NotBuiltError,
    OverloadedError,
    PeerLostError,
    PromptTooLongError,
    ProtocolError,
    ServiceError,
    to_status,
)
from specdec.serving.pods import breaker
from specdec.v2 import model_pb2, verifier_pb2, verifier_pb2_grpc
from tests.captured_logs import captured_logs
from tests.orchestrator.samples import MODEL, context
from tests.stack import until


class Refusing(verifier_pb2_grpc.VerifierServiceServicer):
    """A verifier that ends every session immediately, for `reasons` in order; the last one repeats."""

    def __init__(self, *reasons: str) -> None:
        self.reasons = reasons
        self.asked = 0

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        reason = self.reasons[min(self.asked, len(self.reasons) - 1)]
        self.asked += 1
        await context.abort(grpc.StatusCode.UNAVAILABLE, reason)

    async def FindPrefix(
        self, request: verifier_pb2.FindPrefixRequest, context: Any
    ) -> verifier_pb2.FindPrefixResponse:
        return verifier_pb2.FindPrefixResponse()

    async def GetStats(self, request: Any, context: Any) -> verifier_pb2.GetStatsResponse:
        raise NotImplementedError


class Changing(Refusing):
    """A verifier that opens each session with another identity, then fails before it commits a token. It waits until
    the opening was read (`read`): gRPC may drop a message if its stream ends right after it."""

    def __init__(self, *identities: model_pb2.ModelIdentity) -> None:
        super().__init__("gone")
        self.identities = identities
        self.read = asyncio.Event()

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        opened = verifier_pb2.VerifyOpened(identity=self.identities[min(self.asked, len(self.identities) - 1)])
        self.asked += 1
        await context.write(verifier_pb2.VerifyResponse(opened=opened))
        await self.read.wait()
        self.read.clear()
        await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")


def identity(**fields: Any) -> model_pb2.ModelIdentity:
    usual: dict[str, Any] = {
        "protocol_version": 2,
        "tokenizer_fingerprint": MODEL.tokenizer_fingerprint,
        "context_tokens": MODEL.context,
        "model_fingerprint": "a",
        "numerics_fingerprint": "n",
    }
    return model_pb2.ModelIdentity(**(usual | fields))


@asynccontextmanager
async def serving(verifier: Refusing) -> AsyncIterator[str]:
    server = grpc.aio.server()
    verifier_pb2_grpc.add_VerifierServiceServicer_to_server(verifier, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def test_a_verifier_that_cannot_be_opened_is_told_once_and_when_the_reason_changes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(backoff, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(breaker, "FIRST_OPEN_SECONDS", 0.01)
    monkeypatch.setattr(breaker, "MAX_OPEN_SECONDS", 0.01)
    verifier = Refusing("loading", "loading", "ending", "ending")
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        verification = Verification(context(Peers(pods)))
        with captured_logs() as logs:
            reading = asyncio.create_task(anext(verification.messages()))
            await until(lambda: verifier.asked >= 6)
            reading.cancel()
            await asyncio.wait([reading])
        await pods.close()
    told = [(line["pod"], line["why"]) for line in logs if line["event"] == "verifier_not_opened"]
    assert told == [(address, "UNAVAILABLE: loading"), (address, "UNAVAILABLE: ending")]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tokenizer_fingerprint": "x"}, "tokenizer_mismatch"),
        ({"protocol_version": 999}, "protocol_mismatch"),
        ({"context_tokens": MODEL.context + 1}, "context_mismatch"),
    ],
)
async def test_a_verifier_of_something_else_is_asked_once_for_all_texts(fields: dict[str, Any], reason: str) -> None:
    verifier = Changing(identity(**fields))
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        with captured_logs() as logs:
            for _ in range(3):
                with pytest.raises(ProtocolError):
                    await anext(Verification(context(Peers(pods))).messages())
        await pods.close()
    assert verifier.asked == 1
    assert [(line["event"], line["reason"]) for line in logs] == [("pod_unfit", reason)]


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"sampling": Sampling(banned_sequences=frozenset({(3, 4)}))}, "does not ban words of several tokens"),
        ({"sampling": Sampling(typical_p=0.9)}, "does not apply typical_p"),
        ({"cache_salt": "s"}, "does not separate its caches by cache_salt"),
    ],
)
async def test_a_text_goes_to_no_verifier_that_would_ignore_its_fields(fields: dict[str, Any], problem: str) -> None:
    async with serving(Changing(identity())) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        with pytest.raises(NotBuiltError, match=problem):
            await anext(Verification(context(Peers(pods), **fields)).messages())
        await pods.close()


async def test_a_text_without_a_token_may_begin_at_other_weights() -> None:
    """No token comes from the weights of the earlier session."""
    verifier = Changing(identity(), identity(model_fingerprint="b", numerics_fingerprint="m"))
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        verification = Verification(context(Peers(pods)))
        messages = verification.messages()
        for fingerprint in "ab":
            opened = await anext(messages)
            assert isinstance(opened, verifier_pb2.VerifyOpened)
            assert verification.model_fingerprint == opened.identity.model_fingerprint == fingerprint
            verifier.read.set()
        assert not verification.numerics_changed
        await messages.aclose()
        await pods.close()


class Small(Refusing):
    """A verifier without memory for any text."""

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        self.asked += 1
        status = to_status(PromptTooLongError([("prompt_tokens", "has 9 tokens, must have at most 5")]))
        await context.abort_with_status(status)


class Compiling(Changing):
    """A verifier still compiling the grammar on the first two attempts."""

    pending = 2

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        if self.pending:
            self.pending -= 1
            await context.abort_with_status(to_status(GrammarPendingError("compiles", 0.01)))
        else:
            await super().Verify(requests, context)


async def test_a_new_text_waits_for_its_grammar_and_others_do_not() -> None:
    """A verifier that is compiling the grammar may still have room for other texts."""
    verifier = Compiling(identity())
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        messages = Verification(context(Peers(pods))).messages()
        assert isinstance(await anext(messages), verifier_pb2.VerifyOpened)
        assert verifier.pending == 0
        await messages.aclose()
        verifier.pending = 2
        with pytest.raises(GrammarPendingError):
            await anext(Verification(context(Peers(pods, failover_seconds=0.0))).messages())
        (pod,) = pods
        assert pod.admission.refusal("") is None
        await pods.close()


class Damaged(Changing):
    """A verifier whose first openings arrive invalid."""

    invalid = 1

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        if self.invalid:
            self.invalid -= 1
            await context.abort_with_status(to_status(InvalidRequestError([("grammar", "is not JSON")])))
        await super().Verify(requests, context)


async def test_a_request_is_invalid_only_if_a_second_opening_says_so() -> None:
    """A flipped bit may change an opening and hide its checksum."""
    verifier = Damaged(identity())
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        messages = Verification(context(Peers(pods))).messages()
        assert isinstance(await anext(messages), verifier_pb2.VerifyOpened)
        await messages.aclose()
        verifier.invalid = 2
        with pytest.raises(InvalidRequestError, match="is not JSON"):
            await anext(Verification(context(Peers(pods))).messages())
        assert verifier.invalid == 0
        await pods.close()


@pytest.mark.parametrize("begun", [False, True])
async def test_a_text_that_has_begun_waits_for_a_verifier_with_the_memory(begun: bool) -> None:
    """The verifier with enough memory is down now. A new text is refused immediately, with the reason."""
    verifier, seconds = Small(""), 1.0 if begun else 30.0
    with socket.socket() as down:
        down.bind(("127.0.0.1", 0))
        async with serving(verifier) as address:
            pods = Pods([f"127.0.0.1:{down.getsockname()[1]}", address], connect=grpc.aio.insecure_channel)
            given = context(Peers(pods, failover_seconds=seconds))
            if begun:
                given.text.add([3])
            begin = time.monotonic()
            with pytest.raises(PromptTooLongError):
                await anext(Verification(given).messages())
            assert (time.monotonic() - begin >= seconds) is begun
            await pods.close()


@pytest.mark.parametrize("fields", [{"tokenizer_fingerprint": "x"}, {"protocol_version": 999}])
async def test_a_text_whose_verifier_is_down_is_not_ended_by_one_of_something_else(fields: dict[str, Any]) -> None:
    """The client may go to another orchestrator, perhaps of the version that fits."""
    with socket.socket() as down:
        down.bind(("127.0.0.1", 0))
        async with serving(Changing(identity(**fields))) as address:
            pods = Pods([f"127.0.0.1:{down.getsockname()[1]}", address], connect=grpc.aio.insecure_channel)
            given = context(Peers(pods, failover_seconds=0.5))
            given.text.add([3])
            with pytest.raises(PeerLostError, match="cannot take the text") as lost:
                await anext(Verification(given).messages())
            assert lost.value.reason == "VERIFIER_LOST"
            await pods.close()


class Full(Refusing):
    """A verifier without room."""

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        self.asked += 1
        await context.abort_with_status(to_status(OverloadedError("has 8 sessions, must have at most 8", 1.0)))


async def test_a_verifier_that_comes_back_full_refuses_requests_at_once() -> None:
    """The texts that other orchestrators resumed there fill it, so that no commit closes this one's breaker."""
    async with serving(Full("")) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        (pod,) = pods
        pod.breaker.failed(conclusive=True)
        await until(lambda: pod.breaker.state == "half-open")
        peers = Peers(pods, failover_seconds=3.0)
        openings = [anext(Verification(context(peers)).messages()) for _ in range(20)]
        answers = await asyncio.gather(*openings, return_exceptions=True)
        assert [type(answer) for answer in answers] == 20 * [OverloadedError]
        await pods.close()


async def test_an_answer_to_an_opening_is_small() -> None:
    """The answer stays in memory with the session."""

    class Staying(Changing):
        async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            opened = verifier_pb2.VerifyOpened(identity=self.identities[0])
            await context.write(verifier_pb2.VerifyResponse(opened=opened))
            await asyncio.Event().wait()

    async with serving(Staying(identity(model="x" * (1 << 15)))) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        verification = Verification(context(Peers(pods, failover_seconds=0.0)))
        with captured_logs() as logs, pytest.raises(PeerLostError):
            await anext(verification.messages())
        await pods.close()
    assert "its `opened` has 3" in next(line["why"] for line in logs if "why" in line)


@for_all(st.lists(st.floats(0, 600), min_size=1, max_size=20))
def test_a_peer_is_not_blamed_for_heartbeats_of_a_time_in_which_nobody_read(pauses: list[float]) -> None:
    """The peer sends four a second; after a pause of the reader, they arrive together."""
    now = 0.0
    stream = PeerStream(cast("Any", None), context(Peers(Pods())), clock=lambda: now)

    def heartbeats(count: int) -> None:
        for _ in range(count):
            stream._count_heartbeat()

    for pause in pauses:
        now += pause
        heartbeats(int(4 * pause))
    with pytest.raises(LostError, match="too many heartbeats"):
        heartbeats(10_000 + 2 * MAX_HEARTBEATS)


async def test_a_verifier_that_commits_nothing_changes_no_numerics() -> None:
    """All tokens come from the first and third session."""

    class Returning(Ahead):
        async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
            self.asked += 1
            opening = (await anext(aiter(requests))).open
            numerics = identity(numerics_fingerprint="y" if self.asked == 2 else "x")
            await context.write(verifier_pb2.VerifyResponse(opened=verifier_pb2.VerifyOpened(identity=numerics)))
            if self.asked != 2:
                commit = verifier_pb2.Commit(
                    committed=model_pb2.Committed(
                        base=len(opening.prompt_tokens) + len(opening.generated_tokens), tokens=[5]
                    ),
                    sources=[model_pb2.TOKEN_SOURCE_PLAIN],
                    steps=1,
                    checksum=checksum.extended(opening.checksum, [5]),
                )
                await context.write(verifier_pb2.VerifyResponse(commit=commit))
            await self.read.wait()
            self.read.clear()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "gone")

    verifier = Returning()
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        text = context(Peers(pods))
        verification = Verification(text)
        messages = verification.messages()
        for kind in ("opened", "commit", "opened", "opened", "commit"):
            message = await anext(messages)
            assert isinstance(message, verifier_pb2.Commit) == (kind == "commit")
            if verifier.asked == 2 or kind == "commit":
                verifier.read.set()
        assert not verification.numerics_changed
        assert text.text.generated == [5, 5]
        await messages.aclose()
        await pods.close()


async def test_a_message_that_waited_to_be_read_says_nothing_about_now() -> None:
    now = 0.0

    class Call:
        """A call whose reads take these seconds."""

        def __init__(self, *seconds: float) -> None:
            self.seconds = iter(seconds)

        async def read(self) -> verifier_pb2.VerifyResponse:
            nonlocal now
            now += next(self.seconds)
            return verifier_pb2.VerifyResponse()

    stream = PeerStream(cast("Any", None), context(Peers(Pods())), clock=lambda: now)
    stream._call = cast("Any", Call(0.5, 0.0, 0.0, 0.5, 0.0))
    told = []
    for pause in (0.0, 0.5, 5.0, 0.0, 0.5):
        now += pause
        await stream._read()
        told.append(stream.is_current)
    assert told == [True, True, False, True, True]


class Ahead(Changing):
    """A verifier that commits a token at once, then sends a heartbeat without room, and stays silent."""

    async def Verify(self, requests: Any, context: Any) -> None:  # type: ignore[override]
        opening = (await anext(aiter(requests))).open
        opened = verifier_pb2.VerifyOpened(identity=self.identities[0], capacity=model_pb2.PodCapacity(room=4))
        commit = verifier_pb2.Commit(
            committed=model_pb2.Committed(base=len(opening.prompt_tokens), tokens=[5]),
            sources=[model_pb2.TOKEN_SOURCE_PLAIN],
            steps=1,
            checksum=checksum.extended(opening.checksum, [5]),
        )
        full = model_pb2.Heartbeat(capacity=model_pb2.PodCapacity(sessions=9, room=0))
        await context.write(verifier_pb2.VerifyResponse(opened=opened))
        await context.write(verifier_pb2.VerifyResponse(commit=commit))
        await context.write(verifier_pb2.VerifyResponse(heartbeat=full))
        await asyncio.Event().wait()


async def test_what_a_slow_client_left_unread_changes_no_view_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit from before a failure closes no breaker, and an old heartbeat reports no room."""
    monkeypatch.setattr(peer_stream, "WAITED_SECONDS", 1.0)  # reads of a local socket do not count as waiting
    monkeypatch.setattr(peer_stream, "CURRENT_SECONDS", 0.2)
    async with serving(Ahead(identity())) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        (pod,) = pods
        messages = Verification(context(Peers(pods))).messages()
        await anext(messages)
        pod.breaker.failed(conclusive=True)  # another text has found it dead
        await asyncio.sleep(0.3)  # the client does not read
        assert isinstance(await anext(messages), verifier_pb2.Commit)
        assert pod.breaker.state != "closed"
        reading = asyncio.ensure_future(anext(messages))
        await asyncio.wait([reading], timeout=0.2)
        assert pod.load.reported is None or pod.load.reported.room
        reading.cancel()
        await asyncio.wait([reading])
        await pods.close()


@pytest.mark.parametrize(
    "error", [InvalidRequestError([("grammar", "is no grammar")]), OverloadedError("no room for it", retry_after=1.0)]
)
async def test_an_abort_ends_the_request_and_is_not_the_verifiers_fault(error: ServiceError) -> None:
    verifier = Changing(identity())
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        verification = Verification(context(Peers(pods)))
        messages = verification.messages()
        await anext(messages)
        with captured_logs() as logs:
            verification.abort(error)
            with pytest.raises(type(error)) as raised:
                await anext(messages)
        await pods.close()
    assert raised.value is error
    assert verifier.asked == 1
    assert not logs


async def test_a_text_with_tokens_keeps_its_weights() -> None:
    verifier = Changing(identity(), identity(model_fingerprint="b"))
    async with serving(verifier) as address:
        pods = Pods([address], connect=grpc.aio.insecure_channel)
        text = context(Peers(pods))
        messages = Verification(text).messages()
        await anext(messages)
        text.text.add([5])
        verifier.read.set()
        with pytest.raises(PeerLostError) as error:
            await anext(messages)
        await pods.close()
    assert error.value.reason == "MODEL_CHANGED"
