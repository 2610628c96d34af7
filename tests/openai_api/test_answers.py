"""Complete responses: long parts are encoded incrementally."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest
from google.protobuf.json_format import ParseDict
from hypothesis import given
from hypothesis import strategies as st

from specdec.client.completion import Chunk, Finish, read_chunk
from specdec.openai_api.answers import Calls, Choice, fingerprint, statistics
from specdec.openai_api.event_stream import typed_event_of
from specdec.openai_api.json_text import EncodedList, Json, encoded
from specdec.openai_api.logprobs import of_text
from specdec.openai_api.parts import CallPart, EndPart, TextPart, parts_of
from specdec.openai_api.requests import ParsedRequest, parse_fields
from specdec.openai_api.responses_answer import ResponseAnswer
from specdec.openai_api.responses_request import ResponsesReader
from specdec.v2 import generation_pb2 as pb
from specdec.v2.model_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from specdec.wire.tool_formats import HERMES

TOP = 20


def asking(*, chat: bool, **fields: Any) -> ParsedRequest:
    """Return a request for log-probabilities."""
    prompt = (
        {"messages": [{"role": "user", "content": "hi"}], "logprobs": True} if chat else {"prompt": "hi", "logprobs": 0}
    )
    return parse_fields({"model": "m", **prompt, **fields}, chat=chat)


def chunk(*, spelt: bool = True, last: bool = False) -> Chunk:
    """Return a chunk of one token with its logprobs; `spelt`: whether the most probable tokens have their bytes."""
    response = pb.GenerateResponse(text="a", tokens=[97])
    logprobs = response.logprobs.add(
        chosen=-0.5,
        chosen_bytes=b"a",
        top_tokens=range(97, 97 + TOP),
        top_logprobs=[-0.5 - number for number in range(TOP)],
        top_bytes=[bytes([97 + number]) for number in range(TOP)],
    )
    if not spelt:
        logprobs.ClearField("top_bytes")
    if last:
        ParseDict({"reason": "FINISH_REASON_STOP"}, response.finish)
    return read_chunk(response)


def test_a_fingerprint_is_of_the_weights_too() -> None:
    """Two revisions on equal devices have equal numerics."""

    def of(model: str, numerics: str) -> str:
        choice = Choice(0, asking(chat=False))
        choice.gather(read_chunk(pb.GenerateResponse(text="a", tokens=[97], model_fingerprint=model)), 1)
        choice.gather(read_chunk(pb.GenerateResponse(finish=pb.Finish(numerics_fingerprint=numerics))), 1)
        return fingerprint([choice])

    assert of("1", "a") == of("1", "a")
    assert len({of("1", "a"), of("2", "a"), of("1", "b")}) == 3


@pytest.mark.parametrize(
    ("fields", "chat", "told"),
    [
        ({}, True, 1),
        ({}, False, 2),
        ({"return_token_ids": True}, True, 2),
        ({"skip_special_tokens": False}, True, 2),
        ({"include_stop_str_in_output": True}, True, 2),
    ],
)
async def test_logprobs_of_a_chat_are_those_of_its_content(fields: dict[str, Any], chat: bool, told: int) -> None:
    """An end token is not content, unless the text shows it or token ids are returned too."""
    request = asking(chat=chat, **fields)
    choice = Choice(0, request)
    streamed = [choice.pieces(each, None)[0]["logprobs"] for each in (chunk(), chunk(last=True))]
    name = "content" if chat else "tokens"
    assert sum(len(logprobs[name]) for logprobs in streamed if logprobs) == told
    choice = Choice(0, request)
    for each in (chunk(), chunk(last=True)):
        choice.gather(each, None)
    assert len(json.loads(choice.whole())["logprobs"][name]) == told

    async def chunks() -> AsyncGenerator[Chunk, None]:
        for each in (chunk(), chunk(last=True)):
            yield each

    parts = [part async for part in parts_of(chunks(), None, reasoning=True, with_end=request.tells_end)]
    assert sum(len(part.logprobs) for part in parts if isinstance(part, TextPart)) == told


CALLED = 'Let me see.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\nDone <tool'


def spelled(tokens: Sequence[str], *, last: bool) -> Chunk:
    """Return a chunk of tokens, each with its text and the logprob -n for a text of n characters."""
    response = pb.GenerateResponse(text="".join(tokens), token_texts=tokens, tokens=range(len(tokens)))
    for token in tokens:
        response.logprobs.add(chosen=-len(token), chosen_bytes=token.encode())
    if last:
        response.finish.reason = FINISH_REASON_LENGTH
    return read_chunk(response)


@given(st.lists(st.integers(0, 20)), st.lists(st.integers(0, len(CALLED))))
async def test_logprobs_beside_calls_do_not_depend_on_chunks(chunks: list[int], cuts: list[int]) -> None:
    """The tokens of a call have none; the others are with the text that they complete."""
    places = sorted({0, len(CALLED), *cuts})
    tokens = [CALLED[begin:end] for begin, end in itertools.pairwise(places)]

    async def parts(sizes: Sequence[int]) -> list[tuple[str, list[float]]]:
        async def arriving() -> AsyncGenerator[Chunk, None]:
            bounds = sorted({0, len(tokens), *(min(size, len(tokens)) for size in sizes)})
            for begin, end in itertools.pairwise(bounds):
                yield spelled(tokens[begin:end], last=end == len(tokens))

        found: list[tuple[str, list[float]]] = []
        async for part in parts_of(arriving(), Calls(HERMES, "x"), reasoning=True, with_end=True):
            if isinstance(part, CallPart):
                found.append((f"call of {part.name}", []))
            elif isinstance(part, TextPart):
                if not found or found[-1][0].startswith("call of"):
                    found.append(("", []))
                text, scores = found[-1]
                found[-1] = text + part.text, [*scores, *(entry.chosen for entry in part.logprobs)]
        return found

    one_by_one = await parts(range(len(tokens)))
    assert await parts(chunks) == one_by_one
    assert [text for text, _ in one_by_one][:2] == ["Let me see.\n", "call of f"]


def test_logprobs_of_a_text_with_a_stop_string_are_all_there() -> None:
    response = pb.GenerateResponse(tokens=[97], finish=pb.Finish(reason=FINISH_REASON_STOP, stop="a"))
    response.logprobs.add(chosen=-0.5, chosen_bytes=b"a")
    assert len(of_text(read_chunk(response), with_end=False)) == 1


def finish_of(chunk: Chunk) -> Finish:
    assert chunk.finish is not None
    return chunk.finish


def a_choice(*, chat: bool) -> Choice:
    return Choice(0, asking(chat=chat, include_stop_str_in_output=True))


@pytest.mark.parametrize(
    ("check", "told"),
    [
        (None, None),
        ({"ok": True}, {"ok": True, "path": "", "keyword": ""}),
        ({}, {"ok": None, "path": "", "keyword": ""}),
        (
            {"path": "/tags/1", "keyword": "uniqueItems", "ok": False},
            {"ok": False, "path": "/tags/1", "keyword": "uniqueItems"},
        ),
    ],
)
def test_the_check_of_a_schema_is_told(check: Json | None, told: Json | None) -> None:
    finish = pb.Finish(schema_check=None if check is None else pb.SchemaCheck(**check))
    statistics_of = statistics(finish_of(read_chunk(pb.GenerateResponse(finish=finish))))
    assert statistics_of.get("schema_check") == told


@pytest.mark.parametrize("chat", [False, True])
def test_log_probabilities_are_encoded_as_they_come(chat: bool) -> None:
    """Encoding all of them at the end would stall the event loop."""
    for pieces in (1, 2000):  # the first answer is the warm-up for measuring the second
        choice = a_choice(chat=chat)
        begin = time.process_time()
        for number in range(pieces):
            choice.gather(chunk(last=number == pieces - 1), None)
        gathered = time.process_time()
        text = choice.whole()
        ended = time.process_time()
    assert ended - gathered < (gathered - begin) / 3  # encoding all again would take as long as before
    logprobs = json.loads(text)["logprobs"]
    assert len(logprobs["content" if chat else "tokens"]) == 2000
    if not chat:
        assert logprobs["text_offset"] == list(range(2000))


@pytest.mark.parametrize("chat", [False, True])
def test_a_token_may_be_told_without_what_it_stands_for(chat: bool) -> None:
    """An older orchestrator sends no bytes for the most probable tokens."""
    choice = a_choice(chat=chat)
    assert choice.pieces(chunk(spelt=False), None)[0]["logprobs"]
    choice.gather(chunk(spelt=False, last=True), None)
    logprobs = json.loads(choice.whole())["logprobs"]
    if chat:
        (told,) = logprobs["content"]
        assert {each["token"] for each in told["top_logprobs"]} == {""}
        assert len(told["top_logprobs"]) == TOP
    else:
        assert logprobs["top_logprobs"] == [{"": -0.5, "a": -0.5}]


def test_the_last_events_of_a_response_are_not_encoded_again() -> None:
    """Four events have all log-probabilities: encoding these again would stall the event loop for a second."""
    fields = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": TOP}
    for pieces in (1, 1000):  # the first answer is the warm-up for measuring the second
        answer = ResponseAnswer(ResponsesReader(fields, strict=False).request(), "resp_1", stored=False)
        begin = time.process_time()
        for _ in range(pieces):
            for event in answer.add(TextPart("a", tuple(chunk().logprobs))):
                typed_event_of(event)
        written = time.process_time()
        told = [typed_event_of(event) for event in answer.add(EndPart(finish_of(chunk(last=True))))]
        told.append(typed_event_of(answer.end(stored=False)))
        ended = time.process_time()
    assert ended - written < (written - begin) / 3  # encoding one event again would take as long as before
    contents = [json.loads(event.partition(b"data: ")[2]) for event in told]
    assert [content["type"] for content in contents] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    logprobs = contents[0]["logprobs"]
    assert len(logprobs) == 1000
    assert contents[1]["part"]["logprobs"] == contents[2]["item"]["content"][0]["logprobs"] == logprobs
    assert contents[3]["response"]["output"][0]["content"][0]["logprobs"] == logprobs


def test_encoded_lists_stand_where_they_were() -> None:
    first, second = EncodedList(), EncodedList()
    first.extend([1, "\u00e9"])
    assert json.loads(encoded({"a": first, "b": [second, {"c": first}]}, ascii=True)) == {
        "a": [1, "\u00e9"],
        "b": [[], {"c": [1, "\u00e9"]}],
    }
    with pytest.raises(TypeError, match="set is no JSON"):
        encoded({1})
