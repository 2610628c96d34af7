"""The Messages API through Anthropic's own client."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import pytest
from google.protobuf import json_format
from google.rpc import code_pb2, error_details_pb2

from specdec.client.completion import read_chunk
from specdec.openai_api.anthropic_answer import MessageAnswer
from specdec.openai_api.anthropic_request import parse_count, parse_messages
from specdec.openai_api.errors import ApiError
from specdec.openai_api.parts import CallPart, EndPart
from specdec.v2 import generation_pb2 as pb
from specdec.v2.model_pb2 import FINISH_REASON_LENGTH, FINISH_REASON_STOP
from tests.client.fake_server import TEXT, Act, FakeServer, rich
from tests.openai_api.front import front
from tests.openai_api.test_answers import finish_of
from tests.openai_api.test_reasoning import OPENED
from tests.openai_api.test_tools import WEATHER
from tests.stack import stack

TOOL: Any = {"name": "weather", "description": "Tells it.", "input_schema": WEATHER}
FUNCTION: dict[str, Any] = {"name": "weather", "description": "Tells it.", "parameters": WEATHER}
HI: list[Any] = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def client_of(*orchestrators: str, key: str = "key") -> AsyncIterator[anthropic.AsyncAnthropic]:
    async with (
        front(*orchestrators) as http,
        anthropic.AsyncAnthropic(base_url=f"http://{http.address}", api_key=key, max_retries=0) as client,
    ):
        yield client


async def test_a_text() -> None:
    async with FakeServer(keys=["key"]) as orchestrator, client_of(orchestrator.address) as client:
        asked: dict[str, Any] = {"model": "fake", "max_tokens": 9, "messages": HI, "system": "be brief"}
        asked["extra_body"] = {"top_k": 3}
        asked["stop_sequences"] = ["."]
        found = await client.messages.create(**asked)
        async with client.messages.stream(**asked) as stream:
            begin = await anext(aiter(stream))
            assert begin.type == "message_start"
            started = begin.message.usage.input_tokens, begin.message.usage.output_tokens
            text = "".join([piece async for piece in stream.text_stream])
            last = await stream.get_final_message()
    assert (found.type, found.role, found.model, found.stop_reason) == ("message", "assistant", "fake", "max_tokens")
    assert [block.text for block in found.content if block.type == "text"] == [TEXT]
    assert text == TEXT
    assert [block.text for block in last.content if block.type == "text"] == [TEXT]
    assert (last.stop_reason, last.usage.output_tokens) == (found.stop_reason, found.usage.output_tokens)
    assert started == (2, 0)  # one input token is cached, which only the end reports
    usage = found.usage
    assert (usage.input_tokens, usage.cache_read_input_tokens, last.usage.input_tokens) == (1, 1, 1)
    request = orchestrator.calls[0].request
    assert [(turn.role, turn.content) for turn in request.chat.messages] == [("system", "be brief"), ("user", "hi")]
    assert (request.max_tokens, request.sampling.top_k, list(request.stop)) == (9, 3, ["."])


async def test_errors_have_the_format_of_this_api() -> None:
    lost = Act(tokens=6, then="abort", status=rich(code_pb2.INVALID_ARGUMENT).status)
    async with FakeServer(lost, keys=["key"]) as orchestrator:
        async with client_of(orchestrator.address) as client:
            with pytest.raises(anthropic.APIStatusError, match="refused"):
                async with client.messages.stream(model="fake", max_tokens=9, messages=HI) as stream:
                    await stream.get_final_message()
            with pytest.raises(anthropic.BadRequestError, match="messages: is an empty list, must be") as caught:
                await client.messages.create(model="fake", max_tokens=9, messages=[])
            body: Any = caught.value.body
            assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
            with pytest.raises(anthropic.NotFoundError):
                await client.messages.batches.list()
        async with client_of(orchestrator.address, key="wrong") as client:
            with pytest.raises(anthropic.AuthenticationError, match="unknown API key"):
                await client.messages.create(model="fake", max_tokens=9, messages=HI)


def messages_of(messages: Any, **others: Any) -> Any:
    """Return the chat's messages made from a request's messages."""
    chat = parse_messages({"model": "m", "max_tokens": 9, "messages": messages, **others}).chat.message(0).chat
    told = json_format.MessageToDict(chat, preserving_proto_field_name=True)["messages"]
    return [{name: value for name, value in turn.items() if value} for turn in told]


def test_blocks_become_messages() -> None:
    text = {"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}
    assert messages_of(
        [
            {"role": "user", "content": "how warm?"},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    text,
                    {"type": "tool_use", "id": "a", "name": "weather", "input": {"city": "b"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "a", "content": [text, text]},
                    {"type": "tool_result", "tool_use_id": "b", "is_error": True},
                    {"type": "text", "text": "well?"},
                ],
            },
        ],
        system=[text, text],
    ) == [
        {"role": "system", "content": "x\nx"},
        {"role": "user", "content": "how warm?"},
        {
            "role": "assistant",
            "content": "x",
            "reasoning": "hm",
            "tool_calls": [{"id": "a", "name": "weather", "arguments": '{"city": "b"}'}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "xx"},
        {"role": "tool", "tool_call_id": "b"},
        {"role": "user", "content": "well?"},
    ]


def test_neighbouring_texts_of_the_user_are_one_turn() -> None:
    """Many templates refuse two user turns in a row."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": "21"}
    call = {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "weather"}]}
    text = {"type": "text", "text": "b"}
    empty = {"role": "user", "content": ""}
    turns = [empty, *HI, {"role": "user", "content": [text, text]}, empty, call]
    turns += [{"role": "user", "content": [result, text]}, *HI, {"role": "user", "content": [result]}, *HI]
    assert [(turn["role"], turn["content"]) for turn in messages_of(turns) if "tool_calls" not in turn] == [
        ("user", "hi\n\nbb"),
        ("tool", "21"),
        ("user", "b\n\nhi"),
        ("tool", "21"),
        ("user", "hi"),
    ]
    request = parse_messages({"model": "m", "max_tokens": 9, "system": "s", "messages": turns})
    told = ["system", *(f"messages[{index}]" for index in (0, 4, 5, 5, 7, 8))]
    assert list(request.chat.places) == told


def test_a_leading_system_message_belongs_to_the_system_field() -> None:
    system = {"role": "system", "content": "t"}
    asked = {"model": "m", "max_tokens": 9, "messages": [system, *HI, system]}
    request = parse_messages(asked | {"system": "s"})
    turns = request.chat.message(0).chat.messages
    assert [(turn.role, turn.content) for turn in turns] == [("system", "s\n\nt"), ("user", "hi"), ("system", "t")]
    assert list(request.chat.places) == ["system", "messages[1]", "messages[2]"]


def test_an_error_in_a_joined_text_names_its_own_message() -> None:
    turns = [*HI, {"role": "user", "content": "\ud800"}]
    with pytest.raises(ApiError, match=r"messages\[1\]\.content: has a lone surrogate"):
        parse_messages({"model": "m", "max_tokens": 9, "messages": turns})


def test_a_call_that_was_cut_short_may_be_sent_back_as_it_was_streamed() -> None:
    call = {"type": "tool_use", "id": "a", "name": "weather", "input": '{"city": "b'}
    _, turn, _ = messages_of([*HI, {"role": "assistant", "content": [call]}, *HI])
    assert turn["tool_calls"] == [{"id": "a", "name": "weather", "arguments": '{"city": "b'}]


@pytest.mark.parametrize(
    ("fields", "start"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": "9"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens: is 0, must be at least 1"),
        ({"max_tokens": -1}, "max_tokens: is -1, must be at least 1"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [{"text": "a"}]}]}, "messages[0].content[0].type: is missing"),
        ({"messages": [{"role": "user", "content": ["a"]}]}, "messages[0].content[0]"),
        ({"tools": [5]}, "tools[0]"),
        (
            {"messages": [*HI, {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "weather"}]}]},
            "messages[1]",
        ),
        ({"messages": [{"role": "tool", "content": "so"}]}, "messages[0].role"),
        ({"tool_choice": {"type": []}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tools": [{"name": ["x"]}], "tool_choice": {"type": "none"}}, "tools[0]"),
        ({"system": 5}, "system"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"output_config": 5}, "output_config"),
        ({"output_config": {"format": {"type": "json_object"}}}, "output_config.format.type"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema"),
        ({"tools": [{"name": "f", "input_schema": 5}]}, "tools[0].input_schema"),
        ({"stop": "."}, "stop"),
        ({"stop_sequences": 5}, "stop_sequences"),
        ({"thinking": {"type": "sometimes"}}, "thinking.type"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": "any", "tools": [TOOL]}, "tool_choice"),
        ({"n": 2}, "n"),
    ],
)
def test_refusals(fields: dict[str, Any], start: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_messages({"model": "m", "max_tokens": 9, "messages": HI, **fields})
    assert (caught.value.status, caught.value.param) == (400, start.partition(":")[0])
    assert caught.value.message.startswith(start)


def test_what_a_count_ignores_is_named() -> None:
    assert parse_count({"model": "m", "messages": HI, "nonsense": 1})[1].ignored == ("nonsense",)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("chat.messages[2].content", "messages[1].content"),  # the system prompt is the first message
        ("chat.tools[0].parameters", "tools[0].input_schema"),
        ("chat.tool_name", "tool_choice"),
        ("chat.single_tool_call", "tool_choice.disable_parallel_tool_use"),
        ("chat.template_arguments", "chat_template_kwargs"),
    ],
)
async def test_an_orchestrators_refusal_has_the_names_of_this_api(field: str, name: str) -> None:
    violation = error_details_pb2.BadRequest.FieldViolation(field=field, description="is wrong")
    refusal = rich(code_pb2.INVALID_ARGUMENT, error_details_pb2.BadRequest(field_violations=[violation]))
    turns = [*HI, {"role": "assistant", "content": "ho"}, *HI]
    asked: dict[str, Any] = {"model": "fake", "system": "be brief", "messages": turns, "tools": [TOOL]}
    asked["tool_choice"] = {"type": "tool", "name": "weather"}
    async with FakeServer(refusal, refusal) as orchestrator, client_of(orchestrator.address) as client:
        for send in (client.messages.count_tokens(**asked), client.messages.create(**asked, max_tokens=9)):
            with pytest.raises(anthropic.BadRequestError, match=re.escape(f"{name}: is wrong")):
                await send


@pytest.mark.parametrize("fields", [{"model": 5}, {"messages": []}, {"tools": 5}, {"tools": [{"name": 5}]}])
def test_refusals_of_a_count(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as caught:
        parse_count({"model": "m", "messages": HI, **fields})
    assert (caught.value.param or "").split("[")[0] in fields


def test_what_is_ignored_is_named() -> None:
    blocks = [{"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "a"}]
    result = [{"type": "tool_result", "tool_use_id": "a", "is_error": True, "content": "b"}]
    messages = [*HI, {"role": "assistant", "content": blocks}, {"role": "user", "content": result}]
    fields = {"model": "m", "max_tokens": 9, "messages": messages, "context_management": {}}
    fields["thinking"] = {"budget_tokens": 9}
    assert parse_messages(fields).ignored == (
        "context_management",
        "messages[1].content[0]",
        "messages[2].content[0].is_error",
        "thinking.budget_tokens",
    )
    with pytest.raises(ApiError, match="context_management: unknown parameter"):
        parse_messages(fields, strict=True)
    null = {"messages": [HI[0] | {"name": None}], "output_config": {"tone": None}, "thinking": {"budget_tokens": None}}
    assert not parse_messages({"model": "m", "max_tokens": 9, **null}, strict=True).ignored


async def test_tools_are_called_as_in_a_chat(reasoning_pair: tuple[Path, Path]) -> None:
    async with (
        stack(*reasoning_pair) as services,
        front(services.address) as http,
        client_of(services.address) as client,
    ):
        asked: dict[str, Any] = {"model": services.model.name, "max_tokens": 120, "messages": HI}
        asked |= {"tools": [TOOL], "extra_body": {"seed": 5}}
        asked["tool_choice"] = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        found = await client.messages.create(**asked)
        (call,) = [block for block in found.content if block.type == "tool_use"]
        assert found.stop_reason == "tool_use"
        async with client.messages.stream(**asked) as stream:
            (same,) = [block for block in (await stream.get_final_message()).content if block.type == "tool_use"]
        assert (same.name, same.input) == (call.name, call.input)
        chat: Any = await http.client.chat.completions.create(
            model=services.model.name,
            messages=HI,
            tools=[
                {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}}
            ],
            tool_choice={"type": "function", "function": {"name": "weather"}},
            parallel_tool_calls=False,
            seed=5,
            temperature=1.0,
            max_tokens=120,
        )
        assert json.loads(chat.choices[0].message.tool_calls[0].function.arguments) == call.input
        for most in range(10, found.usage.output_tokens, 10):
            short = await client.messages.create(**asked | {"max_tokens": most})
            assert short.stop_reason == "max_tokens"
            for block in short.content:
                assert block.type != "tool_use" or block.input in ({}, call.input)
        counted = await client.messages.count_tokens(model=services.model.name, messages=HI, tools=[TOOL])
        assert counted.input_tokens == found.usage.input_tokens + (found.usage.cache_read_input_tokens or 0)
        turns: Any = [
            *HI,
            {"role": "assistant", "content": [block.model_dump() for block in found.content]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "21"}]},
        ]
        answer = await client.messages.create(**asked | {"messages": turns, "tool_choice": {"type": "none"}})
        assert answer.stop_reason in ("end_turn", "max_tokens")


async def test_reasoning_is_a_block_unless_it_is_disabled(reasoning_pair: tuple[Path, Path]) -> None:
    async with stack(*reasoning_pair) as services, client_of(services.address) as client:
        asked: dict[str, Any] = {"model": services.model.name, "max_tokens": 40, "messages": HI}
        asked["extra_body"] = {"seed": 2, **OPENED}
        found = await client.messages.create(**asked, thinking={"type": "enabled", "budget_tokens": 1024})
        assert found.content[0].type == "thinking"
        assert found.model_extra is not None
        assert found.model_extra["specdec"]["ignored"] == ["thinking.budget_tokens"]
        async with client.messages.stream(**asked) as stream:
            assert (await stream.get_final_message()).content == found.content
        silent = await client.messages.create(**asked, thinking={"type": "disabled"})
        assert not [block for block in silent.content if block.type == "thinking"]


@pytest.mark.parametrize(
    ("finish", "calls", "reason"),
    [
        (pb.Finish(reason=FINISH_REASON_STOP, stop="<|im_end|>"), 1, "tool_use"),
        (pb.Finish(reason=FINISH_REASON_STOP, stop="<|im_end|>"), 0, "stop_sequence"),
        (pb.Finish(reason=FINISH_REASON_STOP), 1, "tool_use"),
        (pb.Finish(reason=FINISH_REASON_STOP), 0, "end_turn"),
        (pb.Finish(reason=FINISH_REASON_LENGTH), 1, "max_tokens"),
    ],
)
def test_a_message_with_complete_calls_asks_to_run_them(finish: pb.Finish, calls: int, reason: str) -> None:
    """SDKs run tools only for this reason, although a stop sequence behind the calls ended the text."""
    answer = MessageAnswer(parse_messages({"model": "m", "max_tokens": 9, "messages": HI, "tools": [TOOL]}), "r")
    for number in range(calls):
        list(answer.add(CallPart(f"call{number}", "weather", "{}")))
    delta, _ = answer.add(EndPart(finish_of(read_chunk(pb.GenerateResponse(finish=finish)))))
    assert delta["delta"] == {"stop_reason": reason, "stop_sequence": finish.stop or None}
    assert (answer.whole["stop_reason"], answer.whole["stop_sequence"]) == (reason, finish.stop or None)


@pytest.mark.parametrize("system", ["", [], [{"type": "text", "text": ""}]])
def test_an_empty_system_prompt_is_no_message(system: object) -> None:
    request = parse_messages({"max_tokens": 1, "system": system, "messages": HI})
    assert [turn.role for turn in request.chat.prompts[0].chat.messages] == ["user"]
