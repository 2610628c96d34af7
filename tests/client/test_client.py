"""Both clients against a real server: what is sent, and what arrives."""

from __future__ import annotations

from typing import Any

import pytest
from google.rpc import code_pb2, error_details_pb2

from specdec.client import AsyncClient, InvalidRequest, Model, Overloaded, build_request
from tests.client.calls import EVENTUALLY, ROUNDING, logprobs_of, retry_info, written
from tests.client.fake_server import CHUNK, TEXT, TOKENS, Act, FakeServer, rich

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(30)]


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


async def test_a_request_that_is_built_already_is_sent() -> None:
    async with (
        FakeServer() as server,
        AsyncClient(server.address) as client,
        client.send(build_request("hi", seed=5), request_id="mine") as stream,
    ):
        assert written([chunk async for chunk in stream]) == (TEXT, TOKENS)
    assert (server.calls[0].request.text, server.calls[0].metadata["x-request-id"]) == ("hi", "mine")


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
