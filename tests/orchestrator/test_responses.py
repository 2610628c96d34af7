"""Joined responses hold exactly what the single ones held, also in the answer to Complete."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import aclosing

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.text.responses import CompleteAnswer, Responses, coalesced
from specdec.serving.errors import InvalidRequestError
from specdec.v2 import generation_pb2, model_pb2, verifier_pb2

Response = generation_pb2.GenerateResponse


def response(number: int, *, last: bool = False) -> Response:
    tokens = [number] * (1 + number % 3)
    pieces = [f"{number}."] + [""] * (len(tokens) - 1)
    made = Response(
        text="".join(pieces),
        tokens=tokens,
        token_texts=pieces,
        sources=[model_pb2.TOKEN_SOURCE_REMOTE_DRAFT] * len(tokens),
        steps=1 + number % 2,
        offered=number,
        reasoning=f"{number}?" if number < 5 else "",
        reasoning_tokens=max(0, 5 - number),
        index=3,
        seed=None if number else 17,
        model_fingerprint="" if number else "revision",
        logprobs=[verifier_pb2.TokenLogprobs(chosen=-float(number))] * len(tokens),
        timings=generation_pb2.ChunkTimings(elapsed_us=100 + number, forward_us=number % 2, queued_us=number % 3),
    )
    if last:
        made.finish.reason = model_pb2.FINISH_REASON_LENGTH
    return made


async def source(count: int, error: Exception | None = None, closed: list[bool] | None = None) -> Responses:
    try:
        for number in range(count):
            yield response(number, last=error is None and number == count - 1)
        if error is not None:
            raise error
    finally:
        if closed is not None:
            closed.append(True)


async def collected(responses: Responses) -> list[Response]:
    return [each async for each in responses]


def contents(responses: Sequence[Response]) -> tuple[object, ...]:
    return (
        "".join(each.text for each in responses),
        "".join(each.reasoning for each in responses),
        sum(each.reasoning_tokens for each in responses),
        [token for each in responses for token in each.tokens],
        [piece for each in responses for piece in each.token_texts],
        [kind for each in responses for kind in each.sources],
        [each.chosen for response in responses for each in response.logprobs],
        {each.index for each in responses},
        sum(each.steps for each in responses),
        sum(each.offered for each in responses),
        sum(each.timings.queued_us for each in responses),
    )


@given(st.integers(1, 20), st.sampled_from([0.0, 1e-5, math.inf]))
def test_nothing_is_lost_added_or_moved(count: int, seconds: float) -> None:
    alone = [response(number, last=number == count - 1) for number in range(count)]
    got = asyncio.run(collected(coalesced(source(count), seconds)))
    assert contents(got) == contents(alone)
    assert got[-1].HasField("finish")
    assert not any(each.HasField("finish") for each in got[:-1])
    assert (got[0].seed, got[0].model_fingerprint) == (17, "revision")
    assert got[-1].timings.elapsed_us == alone[-1].timings.elapsed_us
    assert got[-1].timings.forward_us == alone[-1].timings.forward_us
    if seconds == 0.0:
        assert len(got) == count


def test_the_first_goes_at_once_the_rest_together() -> None:
    first, rest = asyncio.run(collected(coalesced(source(9), 1e9)))
    assert first == response(0)
    assert contents([rest]) == contents([response(number) for number in range(1, 9)])


def test_what_waits_goes_before_an_error() -> None:
    got: list[Response] = []

    async def read() -> None:
        async for each in coalesced(source(4, ConnectionError("gone")), 1e9):
            got.append(each)  # noqa: PERF401 - an error would lose them

    with pytest.raises(ConnectionError, match="gone"):
        asyncio.run(read())
    assert contents(got) == contents([response(number) for number in range(4)])


def test_a_source_that_just_ends_loses_nothing() -> None:
    async def endless_until(count: int) -> Responses:
        for number in range(count):
            yield response(number)

    got = asyncio.run(collected(coalesced(endless_until(4), 1e9)))
    assert contents(got) == contents([response(number) for number in range(4)])


def test_who_stops_reading_ends_the_source() -> None:
    closed: list[bool] = []

    async def read() -> None:
        async with aclosing(coalesced(source(4, closed=closed), 0.0)) as responses:
            async for _ in responses:
                return

    asyncio.run(read())
    assert closed == [True]


def part(index: int, **fields: object) -> Response:
    return Response(index=index, **fields)  # type: ignore[arg-type]


def test_every_sample_has_its_own_text() -> None:
    answer = CompleteAnswer(7, 2)
    finish = generation_pb2.Finish(reason=model_pb2.FINISH_REASON_STOP)
    answer.add(part(1, text="on", tokens=[1], resolved=generation_pb2.ResolvedRequest(max_tokens=9)))
    answer.add(part(0, reasoning="h", reasoning_tokens=1, tokens=[2]))
    answer.add(part(0, reasoning="m", reasoning_tokens=1, text="a", tokens=[3, 4], finish=finish))
    answer.add(part(1, text="e", tokens=[5]))
    found = answer.message()
    assert (found.seed, found.resolved.max_tokens) == (7, 9)
    first, second = found.completions
    assert (first.reasoning, first.reasoning_tokens, first.text, list(first.tokens)) == ("hm", 2, "a", [2, 3, 4])
    assert (second.reasoning, second.text, list(second.tokens)) == ("", "one", [1, 5])
    assert (first.finish.reason, second.HasField("finish")) == (model_pb2.FINISH_REASON_STOP, False)


def test_a_long_text_is_collected_in_time_linear_in_its_length() -> None:
    """If each piece were appended to the message's string, this would take many seconds."""
    answer, piece = CompleteAnswer(0, 1), part(0, text="x" * 200, tokens=[1])
    begin = time.process_time()
    for _ in range(40_000):
        answer.add(piece)
    assert len(answer.message().completions[0].text) == 200 * 40_000
    assert time.process_time() - begin < 2


def test_what_does_not_fit_a_message_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.text.responses.MAX_ANSWER_BYTES", 1 << 20)
    answer = CompleteAnswer(0, 1)
    answer.add(part(0, text="x" * (1 << 19)))
    with pytest.raises(InvalidRequestError, match="max_tokens: the response is longer than 1 MiB"):
        answer.add(part(0, text="x" * (1 << 19)))
