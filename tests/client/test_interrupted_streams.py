"""Both clients against a server that fails in mid-stream: streams resume without gap or repeat, or the error says why
they cannot."""

from __future__ import annotations

import itertools
from typing import Any

import grpc
import pytest
from google.rpc import code_pb2, error_details_pb2

from specdec.client import PromptChanged, ServerError, Unavailable
from tests.client.calls import BREAK, EVENTUALLY, ROUNDING, logprobs_of, retry_info, written
from tests.client.fake_server import CHUNK, DIGEST, MODEL, REVISION, TEXT, TOKENS, Act, FakeServer, rich

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


async def test_resumes_without_gap_or_repeat(connect: Any) -> None:
    # After tokens 1 and 14, the stream breaks within a character.
    acts = [Act(1, "abort"), Act(13, "abort"), Act(4, "abort")]
    async with FakeServer(*acts) as server, connect(server, max_retries=1) as client:
        chunks = [chunk async for chunk in client.generate("hi", max_tokens=99, temperature=0.8)]
    assert written(chunks) == (TEXT, TOKENS)
    first, *resumed = [call.request for call in server.calls]
    assert not first.sampling.HasField("seed")
    assert [list(request.generated_tokens) for request in resumed] == [TOKENS[:1], TOKENS[:14], TOKENS[:18]]
    # Values filled in by the first server: the next server must not choose others.
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


async def test_statistics_of_all_parts_are_joined(connect: Any) -> None:
    async with FakeServer(Act(7, "abort"), Act(6, "abort")) as server, connect(server) as client:
        chunks = [chunk async for chunk in client.generate("hi", logprobs=2)]
    finish = chunks[-1].finish
    assert finish is not None
    speculation = finish.speculation
    pieces = [len(chunk.tokens) for chunk in chunks if chunk.tokens]  # one per step, ending with the target's own token
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
    """At shutdown a server ends late calls with CANCELLED; the client has not cancelled them."""
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


@pytest.mark.parametrize("learn", [False, True])
async def test_an_interrupted_part_may_be_kept_for_learning(connect: Any, learn: bool) -> None:
    async with FakeServer(Act(7, "abort")) as server, connect(server) as client:
        *_, last = [chunk async for chunk in client.generate("hi", learn=learn)]
    assert last.finish.kept_for_learning == learn


async def test_a_closed_client_ends_a_complete_stream(connect: Any) -> None:
    """The last chunk has arrived, the status of the call has not."""
    async with FakeServer(Act(None, "hold")) as server, connect(server) as client:
        stream = client.generate("hi")
        chunks = []
        async for chunk in stream:
            chunks.append(chunk)
            if chunk.finish is not None:
                await client.close()
    assert written(chunks) == (TEXT, TOKENS)


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
