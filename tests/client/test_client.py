"""Both clients against a real server: every event that a stream may encounter."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from specdec.client import (
    AsyncClient,
    Cancelled,
    Chunk,
    Client,
    DeadlineExceeded,
    InvalidRequest,
    Logprobs,
    Model,
    Overloaded,
    Piece,
    PromptChanged,
    ServerError,
    Unavailable,
    build_request,
    retries,
)
from tests.client.both import ThreadedClient
from tests.client.fake_server import CHUNK, DIGEST, MODEL, REVISION, TEXT, TOKENS, Act, FakeServer, rich

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]

BREAK = Act(tokens=0, then="abort")
EVENTUALLY = 10.0  # time limit for a condition, in seconds
ROUNDING = 1.05  # gRPC rounds timeouts up on the wire


@pytest.fixture(params=[ThreadedClient, AsyncClient], ids=["sync", "asyncio"])
def connect(request: pytest.FixtureRequest) -> Any:
    """Return a factory of clients, of either kind, whose waiting is bounded."""

    def make(*servers: FakeServer, address: Any = None, **settings: Any) -> Any:
        address = ",".join(server.address for server in servers) if address is None else address
        return request.param(address, **{"timeout": EVENTUALLY, **settings})

    return make


async def until(event: asyncio.Event) -> None:
    async with asyncio.timeout(EVENTUALLY):
        await event.wait()


def retry_info(seconds: int, nanos: int = 0) -> Any:
    info = error_details_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = seconds, nanos
    return info


def written(chunks: list[Chunk]) -> tuple[str, list[int]]:
    return "".join(chunk.text for chunk in chunks), [token for chunk in chunks for token in chunk.tokens]


# What arrives


async def test_streams_chunks_and_finishes(connect: Any) -> None:
    async with (
        FakeServer() as server,
        connect(server, metadata=[("tenant", "a")]) as client,
        client.generate("hi", seed=5, logprobs=2) as stream,
    ):
        chunks = [chunk async for chunk in stream]
    assert written(chunks) == (TEXT, TOKENS)
    first, finish = chunks[0], chunks[-1].finish
    assert (first.index, first.sources, first.finish) == (0, ["remote_draft", "remote_draft", "bonus"], None)
    assert first.logprobs[0] == logprobs_of(TOKENS[0])
    assert (first.forward_seconds, first.step_seconds) == (200e-6, 300e-6)
    assert (first.steps, first.offered) == (1, CHUNK)
    assert [chunk.seed for chunk in chunks] == [5] + [None] * (len(chunks) - 1)
    assert finish is not None
    assert (finish.reason, finish.stop, finish.numerics, finish.reproducible) == ("length", "", "fake/float32", True)
    assert (finish.prompt_tokens, finish.completion_tokens) == (2, len(TOKENS))
    assert (finish.exact, finish.preemptions, finish.cached_tokens) == (True, 3, 1)
    assert finish.speculation.mean_tokens_per_step == len(TOKENS) / finish.speculation.steps
    assert server.calls[0].metadata["tenant"] == "a"
    assert server.calls[0].seconds_left <= EVENTUALLY * ROUNDING


async def test_completes(connect: Any) -> None:
    async with FakeServer() as server, connect(server) as client:
        result = await client.complete("hi", n=2, seed=5, logprobs=2)
    assert (result.text, result.seed, len(result.completions)) == (TEXT, 5, 2)
    for completion in result.completions:
        assert (completion.text, completion.tokens) == (TEXT, TOKENS)
        assert len(completion.sources) == len(completion.logprobs) == len(TOKENS)
        assert completion.finish.reason == "length"


async def test_lists_models(connect: Any) -> None:
    async with FakeServer() as server, connect(server) as client:
        assert await client.models() == [
            Model("fake", context_tokens=1024, vocabulary_size=256, chat=True, text_fingerprint="t1")
        ]


async def test_a_request_has_one_id_however_often_it_is_sent(connect: Any) -> None:
    acts = [Act(3, "abort"), Act(), Act(), Act(), Act()]
    async with FakeServer(*acts) as server, connect(server) as client:
        async with client.generate("hi") as stream:
            assert written([chunk async for chunk in stream]) == (TEXT, TOKENS)
        drawn = (await client.complete("hi")).request_id
        given = (await client.complete("hi", request_id="mine")).request_id
        await client.complete("hi", request_id="mine too")
    assert len({stream.request_id, drawn, given}) == 3
    ids = [stream.request_id, stream.request_id, drawn, "mine", "mine too"]
    assert [call.metadata["x-request-id"] for call in server.calls] == ids


async def test_metadata_of_a_call_goes_with_it_alone(connect: Any) -> None:
    """A call's metadata replaces the client's own under the same key."""
    async with FakeServer() as server, connect(server, metadata=[("a", "ours"), ("b", "ours")]) as client:
        await client.complete("hi", metadata=[("a", "its own")])
        async with client.generate("hi", metadata=[("a", "its own")]) as stream:
            assert written([chunk async for chunk in stream]) == (TEXT, TOKENS)
        await client.models(metadata=[("a", "its own")])
        await client.complete("hi")
    sent = [(call.metadata["a"], call.metadata["b"]) for call in (*server.listings, *server.calls)]
    assert sent == [*[("its own", "ours")] * 3, ("ours", "ours")]


async def test_an_id_of_all_calls_is_that_of_a_request_unless_it_has_its_own(connect: Any) -> None:
    async with FakeServer() as server, connect(server, metadata=[("x-request-id", "all"), ("a", "b")]) as client:
        assert (await client.complete("hi")).request_id == "all"
        assert (await client.complete("hi", request_id="one")).request_id == "one"
    assert [call.metadata["x-request-id"] for call in server.calls] == ["all", "one"]
    assert [call.metadata["a"] for call in server.calls] == ["b", "b"]


@pytest.mark.parametrize("request_id", ["", "x" * 65, "\N{SNOWMAN}", "a\nb"])
async def test_an_id_that_services_would_not_take_is_refused_before_anything_is_sent(
    connect: Any, request_id: str
) -> None:
    async with FakeServer() as server, connect(server) as client:
        with pytest.raises(ValueError, match=r"request_id = .*: must be 1 to 64 printable ASCII characters"):
            client.generate("hi", request_id=request_id)
        with pytest.raises(ValueError, match="request_id = "):
            await client.complete("hi", request_id=request_id)
    assert server.calls == []


async def test_streams_several_samples(connect: Any) -> None:
    async with FakeServer() as server, connect(server) as client:
        chunks = [chunk async for chunk in client.generate("hi", n=2)]
    for index in (0, 1):
        assert written([chunk for chunk in chunks if chunk.index == index]) == (TEXT, TOKENS)


async def test_a_closed_client_connects_anew(connect: Any) -> None:
    async with FakeServer() as server:
        client = connect(server)
        for _ in range(2):
            async with client:
                assert (await client.complete("hi")).text == TEXT


# Interrupted streams


async def test_resumes_without_gap_or_repeat(connect: Any) -> None:
    # Tokens 1 and 14 end within a character.
    acts = [Act(1, "abort"), Act(13, "abort"), Act(4, "abort")]
    async with FakeServer(*acts) as server, connect(server, max_retries=1) as client:
        chunks = [chunk async for chunk in client.generate("hi", max_tokens=99, temperature=0.8)]
    assert written(chunks) == (TEXT, TOKENS)
    first, *resumed = [call.request for call in server.calls]
    assert not first.sampling.HasField("seed")
    assert [list(request.generated_tokens) for request in resumed] == [TOKENS[:1], TOKENS[:14], TOKENS[:18]]
    # Values filled in by the first server: the next one must not choose others.
    first.ignore_end_token, first.prompt_digest, first.model = True, DIGEST, REVISION
    first.stop_tokens.append(2)
    for request in resumed:  # seed and model from the first server, all else as requested
        assert request.sampling.seed == chunks[0].seed == 1001
        assert request.model_fingerprint == chunks[0].model_fingerprint == MODEL
        request.ClearField("generated_tokens")
        request.ClearField("model_fingerprint")
        request.sampling.ClearField("seed")
        assert request == first
    assert {(chunk.seed, chunk.model_fingerprint) for chunk in chunks[1:]} == {(None, "")}
    elapsed = [chunk.elapsed_seconds for chunk in chunks[:-1]]
    assert elapsed == sorted(elapsed)


async def test_resumes_what_the_caller_resumed(connect: Any) -> None:
    async with FakeServer(Act(4, "abort")) as server, connect(server) as client:
        chunks = [chunk async for chunk in client.generate("hi", generated_tokens=TOKENS[:8], seed=5)]
    assert written(chunks)[1] == TOKENS[8:]
    assert [list(call.request.generated_tokens) for call in server.calls] == [TOKENS[:8], TOKENS[:12]]


async def test_goes_on_at_another_server(connect: Any) -> None:
    script = iter([Act(9, "hold")])  # for the first call, on whichever server
    async with FakeServer(script=script) as one, FakeServer(script=script) as other, connect(one, other) as client:
        chunks = []
        async for chunk in client.generate("hi"):
            chunks.append(chunk)
            if len(chunks) == 3:
                await (one if one.calls else other).stop()
    assert written(chunks) == (TEXT, TOKENS)
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_goes_on_at_another_server_a_name_stands_for(connect: Any) -> None:
    """One gRPC target resolving to several addresses."""
    script = iter([Act(9, "hold")])
    async with FakeServer(script=script) as one, FakeServer(script=script) as other:
        name = [f"ipv4:{one.address},{other.address}"]
        async with connect(address=name) as client:
            chunks = []
            async for chunk in client.generate("hi"):
                chunks.append(chunk)
                if len(chunks) == 3:
                    await (one if one.calls else other).stop()
    assert written(chunks) == (TEXT, TOKENS)
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_calls_take_turns(connect: Any) -> None:
    async with FakeServer() as one, FakeServer() as other, connect(one, other) as client:
        for _ in range(4):
            await client.complete("hi")
        for _ in range(4):
            assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert (len(one.calls), len(other.calls)) == (4, 4)


async def test_a_server_that_fails_is_left_alone(connect: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "_MIN_REST", 60.0)
    always = itertools.repeat(BREAK)
    async with FakeServer(script=always) as bad, FakeServer() as good, connect(bad, good, max_retries=0) as client:
        for _ in range(8):
            assert (await client.complete("hi")).text == TEXT
    assert (len(bad.calls), len(good.calls)) == (1, 8)


async def test_another_server_is_asked_at_once(connect: Any) -> None:
    script = iter([rich(code_pb2.UNAVAILABLE, retry_info(3600))] * 2)  # for the first calls, on whichever servers
    async with (
        FakeServer(script=script) as one,
        FakeServer(script=script) as other,
        FakeServer(script=script) as third,
        connect(one, other, third) as client,
    ):
        assert (await client.complete("hi")).text == TEXT
    assert [len(server.calls) for server in (one, other, third)] == [1, 1, 1]


def logprobs_of(token: int) -> Logprobs:
    """Return the client's view of the fake server's logprobs; a byte of a longer character has no text."""
    chosen, other = Piece(bytes([token]).decode(errors="replace"), bytes([token])), Piece("\7", b"\7")
    return Logprobs(-0.5, {token: -0.5, 7: -2.0}, chosen, {token: chosen, 7: other})


async def test_statistics_of_all_parts_are_joined(connect: Any) -> None:
    async with FakeServer(Act(7, "abort"), Act(6, "abort")) as server, connect(server) as client:
        chunks = [chunk async for chunk in client.generate("hi", logprobs=2)]
    finish = chunks[-1].finish
    assert finish is not None
    speculation = finish.speculation
    pieces = [len(chunk.tokens) for chunk in chunks if chunk.tokens]  # one per step; its last token is the target's own
    assert speculation.steps == len(pieces)
    assert speculation.offered == CHUNK * len(pieces)
    assert speculation.accepted == len(TOKENS) - len(pieces)
    assert speculation.accepted_histogram == [pieces.count(n) for n in (1, 2, 3)]
    assert speculation.sources == {"remote_draft": len(TOKENS) - len(pieces), "bonus": len(pieces)}
    assert speculation.failover_events == {"resumed": 2}
    assert [entry for chunk in chunks for entry in chunk.logprobs] == [logprobs_of(token) for token in TOKENS]
    assert finish.completion_tokens == len(TOKENS)


async def test_a_text_that_has_begun_waits_for_room(connect: Any) -> None:
    full = rich(code_pb2.RESOURCE_EXHAUSTED, retry_info(0, 250_000_000))
    async with FakeServer(Act(9, "abort"), full, full) as server, connect(server) as client:
        assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert len(server.calls) == 4
    assert server.calls[3].seconds_left <= (EVENTUALLY - 0.55) * ROUNDING


async def test_another_model_is_told(connect: Any) -> None:
    changed = error_details_pb2.ErrorInfo(reason="MODEL_CHANGED", domain="specdec")
    script = itertools.chain([Act(9, "abort")], itertools.repeat(rich(code_pb2.UNAVAILABLE, changed)))
    async with FakeServer(script=script) as server, connect(server, max_retries=2) as client:
        with pytest.raises(Unavailable) as caught:
            [chunk async for chunk in client.generate("hi")]
    assert caught.value.reason == "MODEL_CHANGED"
    assert [call.request.model_fingerprint for call in server.calls] == ["", MODEL]


async def test_a_server_that_has_waited_in_vain_is_not_asked_again(connect: Any) -> None:
    """The server has retried verifiers for its whole failover time; client retries would multiply that."""
    lost = rich(code_pb2.UNAVAILABLE, error_details_pb2.ErrorInfo(reason="VERIFIER_LOST", domain="specdec"))
    script = itertools.repeat(lost)
    async with FakeServer(script=script) as one, FakeServer(script=script) as other, connect(one, other) as client:
        with pytest.raises(Unavailable) as caught:
            await client.complete("hi")
    assert caught.value.reason == "VERIFIER_LOST"
    assert (len(one.calls), len(other.calls)) == (1, 1)


async def test_another_server_may_have_the_model(connect: Any) -> None:
    changed = rich(code_pb2.UNAVAILABLE, error_details_pb2.ErrorInfo(reason="MODEL_CHANGED", domain="specdec"))
    script = iter([Act(9, "abort"), changed, Act()])
    servers = [FakeServer(script=script) for _ in range(3)]
    async with servers[0], servers[1], servers[2], connect(*servers) as client:
        assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert [len(server.calls) for server in servers] == [1, 1, 1]


async def test_another_prompt_is_told_when_no_server_has_the_same(connect: Any) -> None:
    changed = error_details_pb2.ErrorInfo(reason="PROMPT_CHANGED", domain="specdec")
    script = itertools.chain([Act(9, "abort")], itertools.repeat(rich(code_pb2.FAILED_PRECONDITION, changed)))
    async with FakeServer(script=script) as server, connect(server, max_retries=2) as client:
        with pytest.raises(PromptChanged):
            [chunk async for chunk in client.generate("hi")]
    assert len(server.calls) == 2
    assert server.calls[1].request.prompt_digest == DIGEST


async def test_breaks_before_the_first_chunk_are_retried(connect: Any) -> None:
    async with FakeServer(BREAK, BREAK) as server, connect(server) as client:
        chunks = [chunk async for chunk in client.generate("hi", n=2)]
    assert len(server.calls) == 3
    assert written([chunk for chunk in chunks if chunk.index == 1]) == (TEXT, TOKENS)


async def test_several_samples_do_not_resume(connect: Any) -> None:
    async with FakeServer(Act(6, "abort")) as server, connect(server) as client:
        with pytest.raises(Unavailable, match="a stream of 2 samples cannot be resumed: scripted"):
            [chunk async for chunk in client.generate("hi", n=2)]
    assert len(server.calls) == 1


async def test_a_break_after_the_finish_is_no_error(connect: Any) -> None:
    async with FakeServer(Act(None, "abort")) as server, connect(server) as client:
        assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert len(server.calls) == 1


async def test_an_end_without_finish_is_an_error(connect: Any) -> None:
    async with FakeServer(Act(6, "end")) as server, connect(server) as client:
        with pytest.raises(ServerError, match="ended before"):
            [chunk async for chunk in client.generate("hi")]


@pytest.mark.parametrize("retries", [0, 2])
async def test_retries_end(connect: Any, retries: int) -> None:
    async with FakeServer(script=itertools.repeat(BREAK)) as server, connect(server, max_retries=retries) as client:
        with pytest.raises(Unavailable, match="scripted"):
            [chunk async for chunk in client.generate("hi")]
        assert len(server.calls) == retries + 1
        with pytest.raises(Unavailable):
            await client.complete("hi")
        assert len(server.calls) == 2 * (retries + 1)


async def test_complete_and_models_are_retried(connect: Any) -> None:
    async with FakeServer(BREAK, listing=[BREAK]) as server, connect(server) as client:
        assert (await client.complete("hi")).text == TEXT
        assert len(await client.models()) == 1
    assert len(server.calls) == len(server.listings) == 2


async def test_a_server_that_ends_cancels_and_is_left(connect: Any) -> None:
    """Late calls get CANCELLED from the server, not from the client."""
    late = Act(6, "abort", grpc.StatusCode.CANCELLED)
    async with FakeServer(late, BREAK, late) as server, connect(server) as client:
        assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
        assert (await client.complete("hi")).text == TEXT


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2"),
        (grpc.StatusCode.UNKNOWN, "Stream removed"),
    ],
)
async def test_a_connection_that_breaks_by_the_transports_own_words_is_left(
    connect: Any, code: grpc.StatusCode, said: str
) -> None:
    async with FakeServer(Act(6, "abort", code, said)) as server, connect(server) as client:
        assert written([chunk async for chunk in client.generate("hi")]) == (TEXT, TOKENS)
    assert len(server.calls) == 2


async def test_only_unavailable_is_retried(connect: Any) -> None:
    async with FakeServer(Act(6, "abort", grpc.StatusCode.ABORTED)) as server, connect(server) as client:
        with pytest.raises(ServerError) as caught:
            [chunk async for chunk in client.generate("hi")]
    assert caught.value.code is grpc.StatusCode.ABORTED
    assert isinstance(caught.value.__cause__, grpc.RpcError)
    assert len(server.calls) == 1


async def test_no_server(connect: Any) -> None:
    async with FakeServer() as server:
        pass
    async with connect(server, max_retries=1) as client:
        with pytest.raises(Unavailable):
            await client.models()


# Deadlines and cancellation


async def test_deadline_of_a_call_replaces_the_clients(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        await client.models()  # connects first, which may be slow on a busy machine
        stream = client.generate("hi", timeout=2.0)
        assert written([await anext(stream), await anext(stream)])[1] == TOKENS[:6]
        with pytest.raises(DeadlineExceeded):
            await anext(stream)
        await until(server.freed)
        assert server.calls[0].seconds_left <= 2.0 * ROUNDING


async def test_no_deadline(connect: Any) -> None:
    async with FakeServer() as server, connect(server) as client:
        await client.complete("hi", timeout=None)
    assert server.calls[0].seconds_left is None or server.calls[0].seconds_left > 1e6


async def test_a_retry_has_the_time_that_is_left(connect: Any) -> None:
    acts = [Act(3, "abort"), rich(code_pb2.UNAVAILABLE, retry_info(0, 250_000_000))]
    async with FakeServer(*acts) as server, connect(server) as client:
        assert written([chunk async for chunk in client.generate("hi", timeout=5.0)]) == (TEXT, TOKENS)
    assert server.calls[2].seconds_left <= 4.7 * ROUNDING  # two pauses: at least 50 ms, and the server's delay


async def test_the_deadline_ends_the_retries(connect: Any) -> None:
    async with FakeServer(script=itertools.repeat(BREAK)) as server, connect(server, max_retries=10**6) as client:
        with pytest.raises(DeadlineExceeded):
            [chunk async for chunk in client.generate("hi", timeout=2.0)]
    assert len(server.calls) > 1


async def test_does_not_wait_past_the_deadline(connect: Any) -> None:
    async with FakeServer(rich(code_pb2.UNAVAILABLE, retry_info(3600))) as server, connect(server) as client:
        with pytest.raises(DeadlineExceeded, match="refused"):
            await client.complete("hi")


async def test_cancel_frees_the_server(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        stream = client.generate("hi")
        assert (await anext(stream)).tokens == TOKENS[:3]
        stream.cancel()
        await until(server.freed)
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_cancel_ends_a_pending_read(connect: Any) -> None:
    async with FakeServer(Act(0, "hold")) as server, connect(server) as client:
        stream = client.generate("hi")
        reading = asyncio.create_task(stream.__anext__())
        await until(server.held)
        stream.cancel()
        with pytest.raises(Cancelled):
            await reading


async def test_cancel_ends_a_pause(connect: Any) -> None:
    async with FakeServer(rich(code_pb2.UNAVAILABLE, retry_info(3600))) as server, connect(server) as client:
        stream = client.generate("hi", timeout=None)
        reading = asyncio.create_task(stream.__anext__())
        await until(server.called)
        stream.cancel()
        with pytest.raises(Cancelled):
            await reading


async def test_leaving_the_context_frees_the_server(connect: Any) -> None:
    async with FakeServer(Act(6, "hold")) as server, connect(server) as client:
        async with client.generate("hi") as stream:
            await anext(stream)
        await until(server.freed)


async def test_dropping_a_synchronous_stream_frees_the_server() -> None:
    def take_one(client: Client) -> None:
        for _ in client.generate("hi"):
            break

    async with FakeServer(Act(6, "hold")) as server:
        with Client(server.address) as client:
            await asyncio.to_thread(take_one, client)
            await until(server.freed)


async def test_cancelling_the_task_frees_the_server() -> None:
    async with FakeServer(Act(0, "hold")) as server, AsyncClient(server.address) as client:
        stream = client.generate("hi")
        reading = asyncio.create_task(stream.__anext__())
        await until(server.held)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(server.freed)
        with pytest.raises(Cancelled):
            await anext(stream)


async def test_closing_the_client_ends_its_calls(connect: Any) -> None:
    async with FakeServer(Act(0, "hold")) as server, connect(server) as client:
        reading = asyncio.create_task(client.generate("hi").__anext__())
        await until(server.held)
        await client.close()
        with pytest.raises(Cancelled):
            await reading


@pytest.mark.parametrize("streams", [False, True])
async def test_closing_the_client_ends_a_call_that_waits_for_its_next_try(connect: Any, streams: bool) -> None:
    """The call ends without another connection."""
    async with FakeServer(rich(code_pb2.UNAVAILABLE, retry_info(3))) as server, connect(server) as client:
        asking = client.generate("hi").__anext__() if streams else client.complete("hi")
        call = asyncio.ensure_future(asking)
        await until(server.called)
        for _ in range(2):  # their answers follow the refusal on the same connection: the call is in its back-off
            await client.models()
        await client.close()
        with pytest.raises(Cancelled):
            await call
    assert len(server.calls) == 1


async def test_a_request_that_is_built_already_is_sent() -> None:
    async with (
        FakeServer() as server,
        AsyncClient(server.address) as client,
        client.send(build_request("hi", seed=5), request_id="mine") as stream,
    ):
        assert written([chunk async for chunk in stream]) == (TEXT, TOKENS)
    assert (server.calls[0].request.text, server.calls[0].metadata["x-request-id"]) == ("hi", "mine")


# Errors from the server


async def test_violations_are_decoded(connect: Any) -> None:
    fields = [("sampling.top_p", "1.5 is not in (0, 1]"), ("stop", "an empty string")]
    bad = error_details_pb2.BadRequest(
        field_violations=[
            error_details_pb2.BadRequest.FieldViolation(field=field, description=description)
            for field, description in fields
        ]
    )
    reason = error_details_pb2.ErrorInfo(reason="BAD_REQUEST", domain="specdec")
    async with FakeServer(rich(code_pb2.INVALID_ARGUMENT, bad, reason)) as server, connect(server) as client:
        with pytest.raises(InvalidRequest, match="refused") as caught:
            [chunk async for chunk in client.generate("hi")]
    assert caught.value.violations == fields
    assert (caught.value.reason, caught.value.retry_after) == ("BAD_REQUEST", None)


async def test_overload_says_when_to_return(connect: Any) -> None:
    acts = [rich(code_pb2.RESOURCE_EXHAUSTED, retry_info(2, 500_000_000)), rich(code_pb2.RESOURCE_EXHAUSTED)]
    async with FakeServer(*acts) as server, connect(server) as client:
        with pytest.raises(Overloaded) as caught:
            await client.complete("hi")
        assert caught.value.retry_after == 2.5
        with pytest.raises(Overloaded) as caught:
            await client.complete("hi")
        assert caught.value.retry_after is None
