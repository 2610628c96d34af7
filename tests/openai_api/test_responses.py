"""The Responses API through OpenAI's own client."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import openai
import pytest
from google.protobuf import json_format
from google.rpc import code_pb2, error_details_pb2
from starlette.requests import Request

from specdec.client import InvalidRequest
from specdec.openai_api import endpoints
from specdec.openai_api.bodies import Bodies
from specdec.openai_api.errors import ApiError, from_specdec
from specdec.openai_api.fields import MAX_IGNORED
from specdec.openai_api.gateway import Caller
from specdec.openai_api.json_text import Json, encoded
from specdec.openai_api.parsing import Intake, Parser, TakenRequest
from specdec.openai_api.parts import CallPart
from specdec.openai_api.response_store import ResponseStore
from specdec.openai_api.responses_answer import ResponseAnswer
from specdec.openai_api.responses_request import ResponsesReader, carried
from tests.captured_logs import captured_logs
from tests.client.fake_server import TEXT, Act, FakeServer, rich
from tests.openai_api.front import Front, front
from tests.openai_api.test_http_server import post, told
from tests.openai_api.test_reasoning import OPENED
from tests.openai_api.test_response_store import response, stored
from tests.openai_api.test_tools import WEATHER
from tests.reasoning import CLOSE, OPEN
from tests.stack import stack

TOOL: dict[str, Any] = {"type": "function", "name": "weather", "description": "Tells it.", "parameters": WEATHER}
CUSTOM: dict[str, Any] = {"type": "custom", "name": "patch", "description": "Changes it."}
AGENTS: dict[str, Any] = {
    "type": "namespace",
    "name": "agents",
    "description": "Helpers.",
    "tools": [{**TOOL, "name": "ask"}, CUSTOM],
}
SEARCH: dict[str, Any] = {"type": "web_search", "external_web_access": False}


@asynccontextmanager
async def fake(*acts: Act) -> AsyncIterator[tuple[FakeServer, Front]]:
    with stored() as store:
        async with FakeServer(*acts) as orchestrator, front(orchestrator.address, store=store) as http:
            yield orchestrator, http


async def test_a_text() -> None:
    async with fake() as (orchestrator, http):
        found = await http.client.responses.create(
            model="fake", input="hi", instructions="be brief", max_output_tokens=9, temperature=0.5, top_p=0.9
        )
    assert (found.object, found.model, found.output_text) == ("response", "fake", TEXT)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert (found.instructions, found.max_output_tokens, found.temperature) == ("be brief", 9, 0.5)
    assert found.usage is not None
    assert (found.usage.input_tokens, found.usage.input_tokens_details.cached_tokens) == (2, 1)
    assert found.usage.total_tokens == 2 + found.usage.output_tokens
    request = orchestrator.calls[0].request
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert (request.max_tokens, request.sampling.temperature) == (9, 0.5)


async def test_a_text_as_events() -> None:
    async with fake() as (_, http):
        asked: dict[str, Any] = {"model": "fake", "input": "hi", "top_logprobs": 1}
        asked["include"] = ["message.output_text.logprobs"]
        events = [event async for event in await http.client.responses.create(**asked, stream=True)]
        whole = await http.client.responses.create(**asked)
    kinds = [event.type for event in events]
    deltas = kinds.count("response.output_text.delta")
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * deltas,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert deltas > 1
    assert [event.sequence_number for event in events] == list(range(len(events)))
    pieces: list[Any] = events[4 : 4 + deltas]
    assert "".join(piece.delta for piece in pieces) == TEXT
    last: Any = events[-1]
    assert last.response.output_text == TEXT
    content: Any = whole.output[0].content[0]
    logprobs = [logprob.model_dump() for piece in pieces for logprob in piece.logprobs]
    assert logprobs == [logprob.model_dump() for logprob in content.logprobs]
    assert last.response.output[0].content == [content]
    assert all(len(logprob.top_logprobs) == 2 for logprob in content.logprobs)  # the fake server sends two


async def test_a_failure_in_mid_stream() -> None:
    async with fake(Act(tokens=6, then="abort", status=rich(code_pb2.INVALID_ARGUMENT).status)) as (_, http):
        stream = await http.client.responses.create(model="fake", input="hi", stream=True)
        events: list[Any] = [event async for event in stream]
    error, failed = events[-2:]
    assert (error.type, error.message) == ("error", "refused")
    assert (failed.type, failed.response.status, failed.response.error.message) == (
        "response.failed",
        "failed",
        "refused",
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))


def messages_of(items: Any, **others: Any) -> Any:
    """Return the chat's messages made from an input."""
    chat = ResponsesReader({"model": "m", "input": items, **others}).request().chat.message(0).chat
    told = json_format.MessageToDict(chat, preserving_proto_field_name=True)["messages"]
    return [{name: value for name, value in turn.items() if value} for turn in told]


def test_items_become_messages() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "weather", "arguments": "{}"}
    text = {"type": "input_text", "text": "x"}
    assert messages_of(
        [
            {"role": "developer", "content": [text, text]},
            {"type": "message", "role": "user", "content": "how warm?", "id": "1", "status": "completed"},
            {"type": "reasoning", "id": "2", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            call,
            {"role": "assistant", "content": "one moment"},
            {**call, "call_id": "b"},
            {"role": "assistant", "content": [{"type": "output_text", "text": ", please"}]},
            {"type": "function_call_output", "call_id": "a", "output": "21"},
            {"type": "function_call_output", "call_id": "b", "output": [text]},
            {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "+1"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "done"},
            {"role": "assistant", "content": [{"type": "output_text", "text": "warm", "annotations": []}]},
            {"role": "assistant", "content": "really"},
            {**call, "call_id": "d"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "or?"}]},
            {"role": "assistant", "content": "cold"},
        ]
    ) == [
        {"role": "system", "content": "xx"},
        {"role": "user", "content": "how warm?"},
        {
            "role": "assistant",
            "content": "one moment, please",
            "reasoning": "hm",
            "tool_calls": [{"id": each, "name": "weather", "arguments": "{}"} for each in "ab"],
        },
        {"role": "tool", "tool_call_id": "a", "content": "21"},
        {"role": "tool", "tool_call_id": "b", "content": "x"},
        {"role": "assistant", "tool_calls": [{"id": "c", "name": "patch", "arguments": '{"input": "+1"}'}]},
        {"role": "tool", "tool_call_id": "c", "content": "done"},
        {"role": "assistant", "content": "warm"},
        {
            "role": "assistant",
            "content": "really",
            "tool_calls": [{"id": "d", "name": "weather", "arguments": "{}"}],
        },
        {"role": "assistant", "content": "cold", "reasoning": "or?"},
    ]


def test_leading_system_items_belong_to_the_instructions() -> None:
    """Codex sends both; many templates refuse or drop a second system message."""
    parts = [{"type": "input_text", "text": "b"}, {"type": "input_text", "text": "c"}]
    system: list[Any] = [{"role": "developer", "content": parts}, {"type": "message", "role": "system", "content": "d"}]
    user = {"role": "user", "content": "hi"}
    later = [user, system[1]]
    joined = {"role": "system", "content": "a\n\nbc\n\nd"}
    turns = [{"role": "user", "content": "hi"}, {"role": "system", "content": "d"}]
    assert messages_of([*system, *later], instructions="a") == [joined, *turns]
    separate = [{"role": "system", "content": "bc"}, {"role": "system", "content": "d"}]
    assert messages_of([*system, *later]) == [*separate, *turns]
    empty = {"role": "developer", "content": ""}
    assert messages_of([empty, user], instructions="a") == [{"role": "system", "content": "a"}, turns[0]]
    request = ResponsesReader({"input": [*system, *later], "instructions": "a"}).request()
    assert list(request.chat.places) == ["instructions", "input[2]", "input[3]"]
    with pytest.raises(ApiError) as caught:
        ResponsesReader({"input": [*system, user, {"role": 5, "content": ""}], "instructions": "a"}).request()
    assert caught.value.param == "input[3].role"


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"input": None}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"role": "user", "content": [{"text": "a"}]}]}, "input[0].content[0].type: is missing"),
        ({"input": [{"role": "user", "content": ["a"]}]}, "input[0].content[0]"),
        ({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "x"}]}, "input[1].type"),
        ({"input": [{"role": 5, "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call_output", "call_id": "a"}]}, "input[0].output"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"include": ["file_search_call.results"]}, "include"),
        ({"instructions": 5}, "instructions"),
        ({"max_output_tokens": "9"}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens: is 0, must be at least 1"),
        ({"max_output_tokens": -1}, "max_output_tokens: is -1, must be at least 1"),
        ({"max_tokens": 9}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 1}, "n"),
        ({"previous_response_id": 5}, "previous_response_id"),
        ({"reasoning": "low"}, "reasoning"),
        ({"store": "yes"}, "store"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {"uniqueItems": True}, "strict": True}}}, "text.format"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": 5}, "text"),
        ({"include": [{}]}, "include"),
        ({"tool_choice": []}, "tool_choice"),
        ({"tools": [{**CUSTOM, "name": 5}], "tool_choice": "none"}, "tools[0]"),
        ({"temperature": "messages[9]"}, "temperature"),
        ({"tool_choice": {"type": "allowed_tools"}}, "tool_choice.type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "f"}]}, "tools[0].type: is missing"),
        ({"tools": [5]}, "tools[0]"),
        ({"tools": [TOOL, SEARCH], "tool_choice": "required"}, "tools[1].type"),
        ({"tools": [TOOL, {"type": "code_interpreter"}]}, "tools[1].type"),
        ({"tools": [{**AGENTS, "name": ""}]}, "tools[0].name"),
        ({"tools": [{**AGENTS, "name": 60 * "n"}]}, "tools[0].tools[0].name"),
        ({"tools": [{**AGENTS, "name": "my agents"}]}, "tools[0].tools[0].name"),
        ({"tools": [{**AGENTS, "description": 5}]}, "tools[0].description"),
        ({"tools": [{**AGENTS, "tools": {}}]}, "tools[0].tools"),
        ({"tools": [{**AGENTS, "tools": [AGENTS]}]}, "tools[0].tools[0].type"),
        ({"tools": [{**AGENTS, "tools": [{**TOOL, "defer_loading": True}]}]}, "tools[0].tools[0].defer_loading"),
        ({"tools": [{**CUSTOM, "format": {"type": "grammar"}}]}, "tools[0].format"),
        ({"tools": [{**TOOL, "nonsense": 1}]}, "tools[0].nonsense"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"user": "x" * 4097}, "user"),
        ({"safety_identifier": 1}, "safety_identifier"),
        ({"prompt_cache_key": ["x"]}, "prompt_cache_key"),
        ({"reasoning": {"summary": "x" * 4097}}, "reasoning.summary"),
        ({"metadata": ["x"]}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"metadata": {"x" * 65: ""}}, "metadata"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"truncation": "maybe"}, "truncation"),
    ],
)
def test_refusals(fields: dict[str, Any], start: str) -> None:
    with pytest.raises(ApiError) as caught:
        ResponsesReader({"model": "m", "input": "hi", **fields}).request()
    assert (caught.value.status, caught.value.param) == (400, start.partition(":")[0])
    assert caught.value.message.startswith(start)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": 9}, "max_tokens: is max_output_tokens here"),
        ({"n": 1}, "n: is a field of chats"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt: is not supported"),
    ],
)
def test_fields_of_chats_are_named_as_such(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError) as caught:
        ResponsesReader({"model": "m", "input": "hi", **fields})
    assert caught.value.message == message


def test_unknown_fields_are_ignored_and_named() -> None:
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "x"}]}
    fields = {"input": [thought, {"role": "user", "content": "a"}], "nonsense": 1, "echo": True}
    fields["reasoning"] = {"tone": 1}
    assert list(ResponsesReader(fields).request().ignored) == ["nonsense", "echo", "reasoning.tone", "input[0]"]
    with pytest.raises(ApiError, match="nonsense: unknown parameter"):
        ResponsesReader(fields, strict=True).request()
    odd = {"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": {}}], "foo": 1}
    ignored = ResponsesReader({"input": [odd]}).request().ignored
    assert list(ignored) == ["input[0].foo", "input[0].content[0].cache_control"]
    with pytest.raises(ApiError, match=r"input\[0\].foo: unknown parameter"):
        ResponsesReader({"input": [odd]}, strict=True).request()
    null = {"role": "user", "content": [{"type": "input_text", "text": "a", "cache_control": None}], "phase": None}
    nested = {"reasoning": {"tone": None}, "text": {"tone": None}}
    assert not ResponsesReader({"input": [null], **nested}, strict=True).request().ignored
    many = {"input": "a", **{f"x{number}": 1 for number in range(1000)}}
    assert len(ResponsesReader(many).request().ignored) == MAX_IGNORED


def test_values_that_ask_for_the_default_are_accepted() -> None:
    ResponsesReader(
        {
            "model": "m",
            "input": "hi",
            "background": False,
            "client_metadata": {"a": "b"},
            "include": ["reasoning.encrypted_content"],
            "metadata": {"a": "b"},
            "prompt_cache_key": "k",
            "reasoning": {"effort": None, "summary": "detailed"},
            "skip_special_tokens": True,
            "service_tier": "auto",
            "stream_options": {"include_obfuscation": False},
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "user": "u",
        }
    ).request()


def test_a_response_repeats_its_request() -> None:
    tools = [TOOL | {"description": "Tells it: 20 °C, 🌡."}, CUSTOM]
    choice = {"type": "function", "name": "weather"}
    fields: Json = {
        "metadata": {"a": "b"},
        "tools": tools,
        "tool_choice": choice | {"nonsense": "x" * 10_000},
        "reasoning": {"effort": "low", "nonsense": "x" * 10_000},
        "text": {"verbosity": "medium", "nonsense": "x" * 10_000},
        "nonsense": "x" * 10_000,
    }
    request = ResponsesReader({"input": "hi", **fields}).request()
    told = json.loads(encoded(ResponseAnswer(request, "resp_1", stored=True).whole))
    assert (told["tools"], told["tool_choice"], told["metadata"]) == (tools, choice, {"a": "b"})
    assert told["reasoning"] == {"effort": "low", "summary": None}
    assert told["text"] == {"format": {"type": "text"}, "verbosity": "medium"}
    assert "x" * 1000 not in repr(request)


async def test_a_response_is_continued_by_its_id() -> None:
    async with fake() as (orchestrator, http):
        responses: Any = http.client.responses
        first = await responses.create(model="fake", input="one", instructions="be brief")
        second = await responses.create(model="fake", input="two", previous_response_id=first.id)
        assert (second.previous_response_id, second.store) == (first.id, True)
        stream = await responses.create(model="fake", input="three", previous_response_id=second.id, stream=True)
        last: Any = [event async for event in stream][-1]
        turns = [(turn.role, turn.content) for turn in orchestrator.calls[-1].request.chat.messages]
        told = [("user", "one"), ("assistant", TEXT), ("user", "two"), ("assistant", TEXT), ("user", "three")]
        assert turns == told  # instructions of earlier requests are left out
        assert await responses.retrieve(last.response.id) == last.response
        items = [item async for item in await responses.input_items.list(second.id, order="asc")]
        assert [item.content[0].text for item in items] == ["two"]
        await responses.delete(first.id)
        for gone, relation in ((first.id, ""), (second.id, f", which {second.id} continues,")):
            with pytest.raises(openai.BadRequestError, match=f"response '{first.id}'{relation} is not stored here"):
                await responses.create(model="fake", input="x", previous_response_id=gone)


async def test_what_is_not_stored_cannot_be_continued() -> None:
    async with fake() as (_, http):
        found: Any = await http.client.responses.create(model="fake", input="one", store=False)
        assert not found.store
        with pytest.raises(openai.NotFoundError):
            await http.client.responses.retrieve(found.id)
    async with FakeServer() as orchestrator, front(orchestrator.address) as http:
        create: Any = http.client.responses.create
        assert not (await create(model="fake", input="one")).store
        for wrong in ({"store": True}, {"previous_response_id": "resp_x"}):
            with pytest.raises(openai.BadRequestError, match="stores no responses"):
                await create(model="fake", input="one", **wrong)


async def test_a_store_that_is_not_needed_is_not_asked() -> None:
    with stored() as store:
        store.close()
        async with FakeServer() as orchestrator, front(orchestrator.address, store=store) as http:
            found: Any = await http.client.responses.create(model="fake", input="one", store=False)
            counted: Any = await http.client.responses.input_tokens.count(model="fake", input="one")
    assert (found.output_text, counted.object) == (TEXT, "response.input_tokens")


async def test_an_empty_id_of_a_previous_response_is_none() -> None:
    async with fake() as (_, http):
        create: Any = http.client.responses.create
        first = await create(model="fake", input="one", previous_response_id="")
        assert first.previous_response_id is None
        second = await create(model="fake", input="two", previous_response_id=first.id)
        third = await create(model="fake", previous_response_id=second.id)  # no input of its own
        with pytest.raises(openai.BadRequestError, match="input: is missing"):
            await create(model="fake")
    assert (second.previous_response_id, third.previous_response_id) == (first.id, second.id)


def test_parts_of_a_web_search_are_ignored() -> None:
    """Vercel's AI SDK adds them to `include` wherever a web search is offered."""
    parts = ["reasoning.encrypted_content", "web_search_call.action.sources"]
    request = ResponsesReader({"input": "hi", "include": parts}).request()
    assert request.ignored == ("include[1]",)
    with pytest.raises(ApiError, match=r"include\[1\]"):
        ResponsesReader({"input": "hi", "include": parts}, strict=True).request()


def test_empty_instructions_are_no_message() -> None:
    request = ResponsesReader({"input": "hi", "instructions": ""}).request()
    assert [turn.role for turn in request.chat.prompts[0].chat.messages] == ["user"]


async def test_items_are_referred_to_by_their_ids() -> None:
    async with fake() as (orchestrator, http):
        create: Any = http.client.responses.create
        first = await create(model="fake", input="one")
        items: Any = [{"role": "user", "content": "one"}, {"type": "item_reference", "id": first.output[0].id}]
        await create(model="fake", input=[*items, {"role": "user", "content": "two"}])
        turns = [(turn.role, turn.content) for turn in orchestrator.calls[-1].request.chat.messages]
        assert turns == [("user", "one"), ("assistant", TEXT), ("user", "two")]
        for item in ("msg_0_0", first.output[0].id + "9"):
            with pytest.raises(openai.NotFoundError, match="is not a stored item") as refused:
                await create(model="fake", input=[{"type": "item_reference", "id": item}])
            assert (refused.value.param, refused.value.code) == ("input[0].id", "item_not_found")


async def test_references_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake() as (_, http):
        create: Any = http.client.responses.create
        first = await create(model="fake", input="one")
        monkeypatch.setattr(endpoints, "MAX_BODY_BYTES", 1000)
        with pytest.raises(openai.BadRequestError, match="refers to more than 1000 bytes"):
            await create(model="fake", input=[{"type": "item_reference", "id": first.output[0].id}] * 50)


async def test_an_orchestrators_refusal_names_the_item() -> None:
    field = "chat.messages[1].tool_calls[0].arguments"
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description="is not a JSON object")
    refusal = rich(3, error_details_pb2.BadRequest(field_violations=[violation]))
    async with fake(refusal) as (_, http):
        call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "oops"}
        create: Any = http.client.responses.create
        with pytest.raises(openai.BadRequestError) as caught:
            await create(model="fake", instructions="be brief", input=[call])
    assert caught.value.param == "input[0].tool_calls[0].arguments"


def answering(bodies: Bodies, store: ResponseStore) -> endpoints.Responses:
    intake = Intake(Parser(), bodies, lambda _: (Caller("r"), "a"))
    return endpoints.Responses(cast("Any", None), intake, store)


async def read(answer: endpoints.StoredAnswer, bodies: Bodies) -> bytes:
    """Return the answer's bytes; check that they are sent in pieces, and reserved until the end."""
    sent, free, before = list[bytes](), set[int](), bodies._free

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        free.add(bodies._free)

    await answer({}, cast("Any", None), send)
    content = b"".join(sent)
    assert max(map(len, sent)) <= endpoints.SENT_AT_ONCE
    assert (free, bodies._free) == ({before - len(content)}, before)
    return content


async def test_a_stored_response_counts_as_its_owners_until_it_is_read() -> None:
    bodies = Bodies(1.0)
    assert await read(endpoints.StoredAnswer(b"x" * 200_000, bodies, "a"), bodies) == b"x" * 200_000


async def test_listed_items_count_as_their_owners_until_they_are_read() -> None:
    bodies = Bodies(1.0)
    items = [{"type": "message", "role": "user", "content": "x" * 200_000}]
    with stored() as store:
        await store.put("a", items, response(1))
        scope = {"type": "http", "headers": [], "query_string": b"", "path_params": {"response": "resp_1"}}
        listed = await answering(bodies, store).input_items(Request(scope))
    (item,) = json.loads(await read(listed, bodies))["data"]
    assert item["content"] == [{"type": "input_text", "text": "x" * 200_000}]


async def test_items_referred_to_are_reserved_response_by_response() -> None:
    class Watched(ResponseStore):
        async def output(self, caller: str, response_id: str, ids: Collection[str]) -> dict[str, tuple[Json, int]]:
            free.append(bodies._free)
            return await super().output(caller, response_id, ids)

    bodies, free = Bodies(1.0), list[int]()
    store = Watched()
    for number in (1, 2):
        outputs = [{"id": f"msg_{number}_{part}", "type": "message", "content": "x" * 1000} for part in range(5)]
        await store.put("a", [], {**response(number), "output": outputs})
    references = [{"type": "item_reference", "id": item} for item in ("msg_1_0", "msg_2_1", "msg_1_3")]
    taken = TakenRequest(ResponsesReader({"input": references}), 0, Caller("r"), "a")
    async with answering(bodies, store)._continued(taken) as (_, size):
        assert [item["id"] for item in taken.request.items] == ["msg_1_0", "msg_2_1", "msg_1_3"]
        held = free[0] - bodies._free
        assert 3000 < size == held < 4000
    assert (len(free), free[0] - free[1]) == (2, 2 * size // 3)
    assert bodies._free == free[0]
    store.close()


async def test_odd_texts_come_back_as_question_marks() -> None:
    """The request has lone surrogates in names that the answer repeats."""
    body = b'{"model": "fake", "input": "a", "user": "\\ud800", "\\ud800": 1, " x ": 2}'
    async with fake() as (_, http):
        for path in (b"/v1/responses", b"/v1/chat/completions"):
            chat = body.replace(b'"input": "a"', b'"messages": [{"role": "user", "content": "a"}]')
            odd = body if path == b"/v1/responses" else chat
            request = post(odd, headers=b"connection: close\r\n").replace(b"/v1/completions", path)
            answer = await told(http.address, request)
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b"specdec-ignored: %3F, %20x%20" in answer


async def test_long_conversations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoints, "MAX_BODY_BYTES", 2000)
    async with fake() as (_, http):
        create: Any = http.client.responses.create
        first = await create(model="fake", input="x" * 2000)
        with pytest.raises(openai.BadRequestError, match="must be at most 2000"):
            await create(model="fake", input="y", previous_response_id=first.id)


async def test_a_store_that_fails_costs_no_response(tmp_path: Path) -> None:
    file = tmp_path / "responses.db"
    with stored(file=file) as store, captured_logs() as logs:
        store._database.execute("DROP TABLE responses")
        async with FakeServer() as orchestrator, front(orchestrator.address, store=store) as http:
            found: Any = await http.client.responses.create(model="fake", input="one")
        assert (found.output_text, found.store) == (TEXT, False)
    assert "response_not_stored" in [line["event"] for line in logs]


async def test_a_caller_sees_only_its_own() -> None:
    with stored() as store:
        async with FakeServer(keys=["key", "other"]) as orchestrator, front(orchestrator.address, store=store) as http:
            found = await http.client.responses.create(model="fake", input="one")
            other = http.client.with_options(api_key="other")
            for ask in (other.responses.retrieve, other.responses.delete):
                with pytest.raises(openai.NotFoundError):
                    await ask(found.id)
            assert (await http.client.responses.retrieve(found.id)).id == found.id


async def test_the_oldest_items_are_dropped_if_allowed() -> None:
    info = error_details_pb2.ErrorInfo(reason="PROMPT_TOO_LONG", domain="specdec")
    too_long = rich(code_pb2.INVALID_ARGUMENT, info)
    items: Any = [{"role": role, "content": role} for role in ("user", "assistant") * 4] + [
        {"role": "user", "content": "q"}
    ]
    async with fake(too_long, too_long, Act()) as (orchestrator, http):
        await http.client.responses.create(model="fake", input=items, instructions="i", truncation="auto")
    told = [[turn.role[0] for turn in call.request.chat.messages] for call in orchestrator.calls]
    assert ["".join(roles) for roles in told] == ["suauauauau", "suauauau", "suauau"]
    async with fake(too_long) as (_, http):
        with pytest.raises(openai.BadRequestError) as caught:
            await http.client.responses.create(model="fake", input=items)
    assert caught.value.code == "context_length_exceeded"


def test_tools_of_a_namespace_are_functions_with_its_name_before_theirs() -> None:
    fields = {"model": "m", "input": "hi", "tools": [AGENTS, TOOL, SEARCH]}
    request = ResponsesReader(fields).request()
    told = [(tool.name, tool.description) for tool in request.chat.message(0).chat.tools]
    assert told == [
        ("agents__ask", "Helpers.\n\nTells it."),
        ("agents__patch", "Helpers.\n\nChanges it."),
        ("weather", "Tells it."),
    ]
    assert list(request.ignored) == ["tools[2]"]  # the web search, which the model can do without
    with pytest.raises(ApiError, match=r"tools\[2\]: unknown parameter"):
        ResponsesReader(fields, strict=True).request()
    for name, meant in (("ask", "agents__ask"), ("weather", "weather")):
        chosen = ResponsesReader({**fields, "tools": [AGENTS, TOOL], "tool_choice": {"type": "function", "name": name}})
        assert chosen.request().chat.message(0).chat.tool_name == meant
    refusal = InvalidRequest("", violations=[("chat.tools[1].parameters", "is wrong"), ("chat.tools[2].name", "too")])
    error = from_specdec(refusal, request.chat.names)
    assert error.message == "tools[0].tools[1].parameters: is wrong; tools[1].name: too"


def test_copies_of_a_namespaces_description_are_bounded() -> None:
    inner = [{"type": "function", "name": f"f{number}", "description": "x"} for number in range(120)]
    space = {"type": "namespace", "name": "n", "description": "x" * 10_000, "tools": inner}
    with pytest.raises(ApiError, match="has 10000 characters, must have at most 8738 before each of 120") as caught:
        ResponsesReader({"model": "m", "input": "hi", "tools": [space]}).request()
    assert caught.value.param == "tools[0].description"
    with pytest.raises(ApiError, match="has more than 128 tools") as caught:
        ResponsesReader({"model": "m", "input": "hi", "tools": [{**space, "description": ""}] * 2}).request()
    assert caught.value.param == "tools"


@pytest.mark.parametrize(
    "item",
    [
        {"type": "reasoning", "encrypted_content": carried("\N{MUSICAL SYMBOL G CLEF}" * 128)},
        {"role": "developer", "content": "\N{MUSICAL SYMBOL G CLEF}" * 128},
        {"role": "assistant", "content": "\N{MUSICAL SYMBOL G CLEF}" * 128},
    ],
)
def test_joined_items_take_linear_time(item: Json) -> None:
    """Time that is quadratic in the number of items would grow by 16."""
    call = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}

    def seconds(number: int) -> float:
        first = [call] if item.get("role") == "assistant" else []
        items = [*first, *[item] * number, {"role": "user", "content": "a"}]
        reader = ResponsesReader({"model": "m", "instructions": "a", "input": items})
        begin = time.process_time()
        reader.request()
        return time.process_time() - begin

    seconds(100)
    assert seconds(16_000) < 10 * seconds(4_000)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"input": "a\\nb', "a\nb"),
        ('{"input": "a\\nb\\', "a\nb"),
        ('{"input": "a\\u00', "a"),
        ('{"input": "a\\ud83d', "a"),
        ('{"input": "a\\\\', "a\\"),
        ('{"input": "a\\\\u00', "a\\u00"),
        ('{"input": ', ""),
        ('{"inp', ""),
    ],
)
def test_the_input_of_a_custom_call_that_was_cut_off(arguments: str, told: str) -> None:
    reader = ResponsesReader({"model": "m", "input": "hi", "tools": [CUSTOM]})
    answer = ResponseAnswer(reader.request(), "resp_1", stored=False)
    list(answer.add(CallPart("a", "patch", arguments)))
    assert answer.output[0]["input"] == told


def test_a_custom_tool_makes_no_function_strict() -> None:
    """Strict functions are refused for a model whose format of calls is not known."""
    asked = {"model": "m", "input": "hi", "tools": [CUSTOM, TOOL, AGENTS]}
    chat = ResponsesReader(asked).request().chat.message(0).chat
    assert not any(tool.strict for tool in chat.tools)


@pytest.mark.parametrize("arguments", ['{"input": 5}', '{"patch": "+1"}', "{}"])
def test_a_custom_call_with_other_arguments_has_them_as_its_input(arguments: str) -> None:
    reader = ResponsesReader({"model": "m", "input": "hi", "tools": [CUSTOM]})
    answer = ResponseAnswer(reader.request(), "resp_1", stored=False)
    list(answer.add(CallPart("a", "patch", arguments)))
    assert answer.output[0]["input"] == arguments


def test_a_call_of_a_tool_of_a_namespace_is_told_by_both_names() -> None:
    call = {"type": "function_call", "call_id": "a", "name": "ask", "namespace": "agents", "arguments": "{}"}
    (turn,) = messages_of([call])
    assert turn["tool_calls"] == [{"id": "a", "name": "agents__ask", "arguments": "{}"}]
    answer = ResponseAnswer(
        ResponsesReader({"model": "m", "input": "hi", "tools": [AGENTS]}).request(), "r", stored=False
    )
    events = [
        *answer.add(CallPart("a", "agents__ask", "{}")),
        *answer.add(CallPart("b", "agents__patch", '{"input": "x"}')),
    ]
    found = [{name: item.get(name) for name in ("type", "name", "namespace")} for item in answer.output]
    assert found == [
        {"type": "function_call", "name": "ask", "namespace": "agents"},
        {"type": "custom_tool_call", "name": "patch", "namespace": "agents"},
    ]
    assert [event["item"]["namespace"] for event in events if "item" in event] == 4 * ["agents"]
    (done,) = [event for event in events if event["type"] == "response.function_call_arguments.done"]
    assert done["name"] == "ask"


async def test_the_tokens_of_a_prompt_are_counted(reasoning_pair: tuple[Path, Path]) -> None:
    """The count is that of the response to the same request, even if it continues an earlier one."""
    with stored() as store:
        async with stack(*reasoning_pair) as services, front(services.address, store=store) as http:
            responses: Any = http.client.responses
            asked: dict[str, Any] = {"model": services.model.name, "input": "hi", "instructions": "be brief"}
            for more in ({}, {"tools": [TOOL]}, {"input": [{"role": "user", "content": "how warm is it?"}]}):
                asked |= more
                counted = await responses.input_tokens.count(**asked)
                found = await responses.create(**asked, max_output_tokens=9)
                assert (counted.object, counted.input_tokens) == ("response.input_tokens", found.usage.input_tokens)
                asked["previous_response_id"] = found.id
            with pytest.raises(openai.BadRequestError, match=r"input\[0\].content: is 5, must be text"):
                await responses.input_tokens.count(**asked | {"input": [{"role": "user", "content": 5}]})


async def test_tools_are_called_as_in_a_chat(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        fixed: dict[str, Any] = {"seed": 5, "temperature": 1.0, "parallel_tool_calls": False, "max_tokens": 120}
        own = {name: value for name, value in fixed.items() if name not in ("seed", "max_tokens")}
        asked: dict[str, Any] = {"model": services.model.name, "input": "how warm is it?", "max_output_tokens": 120}
        asked |= {
            "tool_choice": {"type": "function", "name": "weather"},
            "tools": [TOOL],
            "extra_body": {"seed": 5},
            **own,
        }
        found = await http.client.responses.create(**asked)
        (call,) = [item for item in found.output if item.type == "function_call"]
        create: Any = http.client.chat.completions.create
        chat = await create(
            model=services.model.name,
            messages=[{"role": "user", "content": "how warm is it?"}],
            tools=[{"type": "function", "function": {key: value for key, value in TOOL.items() if key != "type"}}],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            **fixed,
        )
        (same,) = chat.choices[0].message.tool_calls
        assert (call.name, call.arguments) == (same.function.name, same.function.arguments)
        assert found.status == "completed"
        streamed = [event async for event in await http.client.responses.create(**asked, stream=True)]
        (done,) = [event for event in streamed if event.type == "response.function_call_arguments.done"]
        assert done.arguments == call.arguments
        limits = range(15, 80, 10)
        short = [await http.client.responses.create(**asked | {"max_output_tokens": most}) for most in limits]
        cut = [i for answer in short for i in answer.output if i.type == "function_call" and i.status == "incomplete"]
        assert cut
        assert {item.name for item in cut} == {"weather"}
        assert all(item.arguments.startswith("{") or not item.arguments for item in cut)
        back: list[Any] = [{"role": "user", "content": "how warm is it?"}, cut[0].model_dump(exclude_none=True)]
        back += [{"type": "function_call_output", "call_id": cut[0].call_id, "output": "cut short"}]
        answer = await http.client.responses.create(**asked | {"input": back, "tool_choice": "none"})
        assert answer.status in ("completed", "incomplete")
        (quote,) = services.model.tokenizer.encode('"', special=False)  # ends the input soon
        custom = asked | {"tools": [CUSTOM], "tool_choice": {"type": "custom", "name": "patch"}}
        custom["extra_body"] = {"seed": 5, "logit_bias": {str(OPEN): -100, str(quote): 20}}
        (item,) = [i for i in (await http.client.responses.create(**custom)).output if i.type == "custom_tool_call"]
        assert item.name == "patch"
        assert isinstance(item.input, str)
        kinds = [event.type async for event in await http.client.responses.create(**custom, stream=True)]
        assert "response.custom_tool_call_input.done" in kinds


async def test_reasoning_is_an_item_of_its_own(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, front(services.address) as http:
        asked: dict[str, Any] = {"model": services.model.name, "input": "how warm is it?", "max_output_tokens": 40}
        asked |= {"temperature": 1.0, "extra_body": {"seed": 2, "logit_bias": {str(CLOSE): 4}, **OPENED}}
        found = await http.client.responses.create(**asked)
        reasoning, message = found.output
        assert reasoning.type == "reasoning"
        assert message.type == "message"
        assert reasoning.content
        assert found.usage is not None
        assert found.usage.output_tokens_details.reasoning_tokens > 0
        events: list[Any] = [event async for event in await http.client.responses.create(**asked, stream=True)]
        thought = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
        said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert (thought, said) == (reasoning.content[0].text, found.output_text)
        again: Any = [item.model_dump(exclude_none=True) for item in found.output]
        turns = [{"role": "user", "content": "how warm is it?"}, *again, {"role": "user", "content": "and now?"}]
        assert (await http.client.responses.create(**asked | {"input": turns})).output
