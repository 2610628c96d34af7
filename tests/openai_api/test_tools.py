"""Tool calls and results through OpenAI's own client, in every tool format, with and without drafts."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import pytest
import pytest_asyncio
from openai import BadRequestError

from specdec.client import AsyncClient
from specdec.v2 import generation_pb2 as pb
from specdec.wire.tool_formats import (
    GRANITE,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_CODER,
    TaggedCall,
    ToolFormat,
    written,
)
from tests.client.fake_server import FakeServer
from tests.faults.cluster import Models
from tests.openai_api.front import Front, front
from tests.services.conftest import Directories
from tests.stack import Stack, stack
from tests.tool_templates import TEMPLATES

pytestmark = pytest.mark.asyncio(loop_scope="module")

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "unit": {"$ref": "#/$defs/unit"}},
    "$defs": {"unit": {"enum": ["C", "F"]}},
    "required": ["city", "unit"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "description": "Tells it.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "time"}},
]
SCHEMAS = {"weather": WEATHER, "time": {"type": "object", "maxProperties": 0}}
RESPONSES_TIME: Any = {"type": "function", "name": "time", "parameters": {}, "strict": False}
MESSAGES: list[Any] = [{"role": "user", "content": "how warm is it?"}]


SPECIAL = {MISTRAL: {"<pad>": "[TOOL_CALLS]"}, MISTRAL_ARGS: {"<pad>": "[TOOL_CALLS]", "<s>": "[ARGS]"}}
"""For families whose marks are special tokens: the token that each mark replaces in the vocabulary."""

FORMS: dict[str, tuple[ToolFormat, dict[str, str]]] = {
    each.name: (each, {}) for each in (HERMES, LLAMA, MISTRAL, GRANITE, QWEN_CODER)
}
FORMS |= {f"{each.name}, its marks special tokens": (each, marks) for each, marks in SPECIAL.items()}
"""Tool formats with their special tokens, by name."""

SHOWN = ("hermes", "llama3_json", "qwen3_coder", "mistral_args, its marks special tokens")
"""Forms tried by every test run; `make verify` tries them all."""


class NewModel(FakeServer):
    """Serves a model that other orchestrators do not list yet. Its answer is a call."""

    tool_format = HERMES.name

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> AsyncIterator[pb.GenerateResponse]:
        await self._begin(request, context)
        resolved = pb.ResolvedRequest(tool_format=self.tool_format)
        yield pb.GenerateResponse(resolved=resolved, text=written(HERMES, [("time", {})]), finish=pb.Finish())


class OlderOrchestrator(NewModel):
    """Sends the format only with its models."""

    tool_format = ""

    async def ListModels(self, request: pb.ListModelsRequest, context: Any) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(models=[pb.ServedModel(name="old", tool_format=HERMES.name)])


@pytest.mark.asyncio(loop_scope="function")
async def test_calls_are_read_in_the_format_sent_with_the_text() -> None:
    asked: dict[str, Any] = {"model": "new", "messages": MESSAGES, "tools": TOOLS}
    async with NewModel() as orchestrator, front(orchestrator.address) as http:
        create: Any = http.client.chat.completions.create
        (choice,) = (await create(**asked)).choices
        assert [call.function.name for call in choice.message.tool_calls] == ["time"]
        pieces = [event.choices[0].delta async for event in await create(**asked, stream=True)]
        assert [call.function.name for piece in pieces for call in piece.tool_calls or ()] == ["time"]
        message = await http.client.responses.create(model="new", input="hi", tools=[RESPONSES_TIME])
        assert [item.type for item in message.output] == ["function_call"]
        assert len(orchestrator.listings) == 1  # the check of the key


@pytest.mark.asyncio(loop_scope="function")
async def test_an_older_orchestrator_lists_the_format() -> None:
    asked: dict[str, Any] = {"model": "old", "messages": MESSAGES, "tools": TOOLS}
    async with OlderOrchestrator() as orchestrator, front(orchestrator.address) as http:
        create: Any = http.client.chat.completions.create
        (choice,) = (await create(**asked)).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["time"]


class Served(NamedTuple):
    """A running stack, and the tool format that its target uses."""

    tool_format: ToolFormat
    services: Stack
    http: Front


@pytest_asyncio.fixture(
    scope="module",
    loop_scope="module",
    params=[pytest.param(name, marks=[] if name in SHOWN else pytest.mark.verify) for name in FORMS],
)
async def served(
    request: pytest.FixtureRequest, models: Models, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Served]:
    tool_format, special = FORMS[request.param]
    folder = tmp_path_factory.mktemp("tools")
    for name, source in (("target", models.target), ("draft", models.draft)):
        shutil.copytree(source, folder / name)
        settings = json.loads((folder / name / "tokenizer_config.json").read_text())
        settings["chat_template"] = TEMPLATES[tool_format]
        file = folder / name / "tokenizer.json"
        for token, mark in special.items():
            file.write_text(file.read_text().replace(f'"{token}"', f'"{mark}"'))
            settings = {key: value for key, value in settings.items() if value != token}
        (folder / name / "tokenizer_config.json").write_text(json.dumps(settings))
    async with stack(folder / "target", folder / "draft") as services, front(services.address) as http:
        yield Served(tool_format, services, http)


def check(calls: Any) -> None:
    assert calls
    for call in calls:
        assert call.type == "function"
        assert len(call.id) == 9
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])


async def test_a_round_trip(served: Served) -> None:
    tool_format, services, http = served
    asked: dict[str, Any] = {"model": services.model.name, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 120}
    create: Any = http.client.chat.completions.create
    for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
        options = {"tool_choice": choice, "seed": 5, "temperature": 1.0, "parallel_tool_calls": False}
        (whole,) = (await create(**asked, **options)).choices
        assert (whole.finish_reason, whole.message.content) == ("tool_calls", None)
        check(whole.message.tool_calls)
        assert len(whole.message.tool_calls) == 1
        pieces: list[Any] = []
        async for event in await create(**asked, **options, stream=True):
            (piece,) = event.choices
            assert not piece.delta.content
            pieces += piece.delta.tool_calls or []
        assert piece.finish_reason == "tool_calls"
        plain = (await create(**asked, **options, extra_body={"specdec": {"speculation": "off"}})).choices[0]
        found = [each.function.model_dump() for each in (*pieces, *plain.message.tool_calls)]
        assert found == 2 * [whole.message.tool_calls[0].function.model_dump()]
    (call,) = whole.message.tool_calls
    turns = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "21"},
    ]
    answer = await create(**{**asked, "messages": turns}, tool_choice="none", seed=1)
    assert answer.choices[0].message.tool_calls is None
    async with AsyncClient(services.address) as client:
        (model,) = await client.models()
        assert model.tool_format == tool_format.name
        plain_turns: list[Any] = [{**turn, "content": turn["content"] or ""} for turn in turns]
        prompted = await client.tokenize(messages=plain_turns)
    prompt = services.model.tokenizer.decode(prompted.ids)
    arguments = call.function.arguments
    if isinstance(tool_format.call, TaggedCall):
        assert written(tool_format, [(call.function.name, json.loads(arguments))]) in prompt
    else:
        assert arguments in prompt
    assert "21" in prompt


async def test_what_is_said_freely_may_hold_calls_that_fit(served: Served) -> None:
    """A strict function gives the text a grammar that also allows other text. In formats with a token for it, a logit
    bias starts a call."""
    tool_format, services, http = served
    strict: list[Any] = [{"type": "function", "function": {**tool["function"], "strict": True}} for tool in TOOLS]
    marker = services.model.tool_tokens.get(tool_format.marker)
    (brace,) = services.model.tokenizer.encode("{", special=False)
    begins = marker if marker is not None else brace if tool_format is LLAMA else None
    for seed in range(3):
        answer: Any = await http.client.chat.completions.create(
            model=services.model.name,
            messages=MESSAGES,
            tools=strict,
            max_tokens=60,
            seed=seed,
            parallel_tool_calls=False,
            logit_bias={} if begins is None else {str(begins): 100},
        )
        (choice,) = answer.choices
        if begins is None:
            assert choice.message.content or choice.message.tool_calls
        else:
            check(choice.message.tool_calls)


async def test_refusals(served: Served) -> None:
    _, services, http = served
    create: Any = http.client.chat.completions.create
    asked: dict[str, Any] = {"model": services.model.name, "messages": MESSAGES}
    inner = {"type": "object", "properties": {"a": {"type": "strin"}}}
    wrong = {"type": "function", "function": {"name": "f", "parameters": inner}}
    text = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
    guided = {"type": "function", "function": {"name": "f", "parameters": {"x-guidance": 5}}}
    for options, param in (
        ({"tools": [wrong], "tool_choice": "required"}, "tools[0].parameters"),
        ({"tools": [text]}, "tools[0].parameters"),
        ({"tools": [guided], "tool_choice": "required"}, "tools[0].parameters"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools[1].name"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
    ):
        with pytest.raises(BadRequestError) as refused:
            await create(**asked, **options)
        assert refused.value.param == param, refused.value


async def test_a_template_that_takes_no_tools_is_told(directories: Directories) -> None:
    async with stack(directories.target, None) as services, front(services.address) as http:
        with pytest.raises(BadRequestError, match="the model's chat template supports no tools"):
            await http.client.chat.completions.create(model=services.model.name, messages=MESSAGES, tools=TOOLS)


async def test_calls_in_a_form_that_is_not_known_are_content(models: Models, tmp_path: Path) -> None:
    """The format is not guessed: calls in an unknown format may be generated but not forced."""
    shutil.copytree(models.target, tmp_path / "target")
    template = "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}"
    template += "```json\n{{ c.function | tojson }}\n```{% endfor %}{% endfor %}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    async with stack(tmp_path / "target", None) as services, front(services.address) as http:
        create: Any = http.client.chat.completions.create
        asked: dict[str, Any] = {"model": services.model.name, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 20}
        (choice,) = (await create(**asked, seed=1)).choices
        assert choice.message.tool_calls is None
        assert choice.message.content
        named = {"type": "function", "function": {"name": "weather"}}
        for options, param in (
            ({"tool_choice": "required"}, "tool_choice"),
            ({"tool_choice": named}, "tool_choice"),
            ({"parallel_tool_calls": False}, "parallel_tool_calls"),
            ({"tools": [{"type": "function", "function": {"name": "f", "strict": True}}]}, "tools[0].strict"),
        ):
            with pytest.raises(BadRequestError, match="no known format of calls") as refused:
                await create(**asked | options)
            assert refused.value.param == param


ANSWER = {
    "type": "object",
    "properties": {"degrees": {"type": "integer", "minimum": 0, "maximum": 40}},
    "required": ["degrees"],
    "additionalProperties": False,
}
BY_SCHEMA = {"type": "json_schema", "json_schema": {"name": "answer", "schema": ANSWER}}


@pytest.mark.parametrize("served", ["hermes", "llama3_json"], indirect=True)
async def test_a_text_is_calls_or_an_answer_by_a_schema(served: Served) -> None:
    """A logit bias starts one or the other. With `required` there is no answer, with `none` there are no calls."""
    tool_format, services, http = served
    create: Any = http.client.chat.completions.create
    asked: dict[str, Any] = {"model": services.model.name, "messages": MESSAGES, "tools": TOOLS, "max_tokens": 150}
    asked |= {"response_format": BY_SCHEMA, "seed": 1, "temperature": 1.0, "parallel_tool_calls": False}

    def towards(*begins: str) -> dict[str, int]:
        return {str(services.model.tokenizer.encode(begin, special=False)[0]): 100 for begin in begins}

    (choice,) = (await create(**asked, tool_choice="required")).choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    check(choice.message.tool_calls)
    (choice,) = (await create(**asked, tool_choice="none")).choices
    assert choice.message.tool_calls is None
    jsonschema.validate(json.loads(choice.message.content), ANSWER)
    for seed in range(6):
        for bias, reason in ((towards("{", "d"), "stop"), (towards("<", "n"), "tool_calls"), ({}, None)):
            (choice,) = (await create(**{**asked, "seed": seed}, logit_bias=bias)).choices
            calls = choice.message.tool_calls
            assert choice.finish_reason == (reason or ("tool_calls" if calls else "stop")), tool_format.name
            if calls:
                check(calls)
                assert choice.message.content is None
            else:
                jsonschema.validate(json.loads(choice.message.content), ANSWER)


@pytest.mark.parametrize("served", ["hermes"], indirect=True)
async def test_a_call_that_was_cut_short_is_a_call(served: Served) -> None:
    tool_format, services, http = served
    whole = written(tool_format, [("weather", {"city": "Bonn", "unit": "C"})])
    create: Any = http.client.chat.completions.create
    most = len(services.model.tokenizer.encode(whole[: whole.index("Bonn")], special=False))
    asked: dict[str, Any] = {"model": services.model.name, "messages": MESSAGES, "tools": TOOLS, "max_tokens": most}
    asked |= {"tool_choice": {"type": "function", "function": {"name": "weather"}}, "seed": 1}
    (choice,) = (await create(**asked)).choices
    assert (choice.finish_reason, choice.message.content) == ("length", None)
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    assert call.function.arguments.startswith('{"city')
    pieces = [event.choices[0] async for event in await create(**asked, stream=True)]
    assert pieces[-1].finish_reason == "length"
    assert pieces[-1].delta.tool_calls is None  # SDKs would not report a call that comes with the end as complete
    assert not any(piece.delta.content for piece in pieces)
    (streamed,) = [call for piece in pieces for call in piece.delta.tool_calls or ()]
    assert streamed.function.arguments == call.function.arguments
    back = [*MESSAGES, choice.message.model_dump(exclude_none=True)]
    back += [{"role": "tool", "tool_call_id": call.id, "content": "cut short"}]
    (choice,) = (await create(**asked | {"messages": back, "tool_choice": "none"})).choices
    assert choice.finish_reason in ("stop", "length")
