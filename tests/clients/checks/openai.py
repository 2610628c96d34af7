"""OpenAI's Python client."""

from __future__ import annotations

from typing import Any

import openai

from tests.clients.checks.uses import (
    OPENAI_TOOL,
    PROMPT,
    QUESTION,
    TOKENS,
    WEATHER,
    called,
    equal,
    joined,
    same_text,
    server,
    use,
    weather,
)
from tests.clients.checks.weather import Weather

SERVER = server()
client: Any = openai.OpenAI(base_url=SERVER.base, api_key=SERVER.key, max_retries=0)
MESSAGES: Any = [{"role": "user", "content": QUESTION}]
CHAT: Any = {"model": SERVER.model, "messages": MESSAGES, "max_completion_tokens": TOKENS, "temperature": 0}
TEXT: Any = {"model": SERVER.model, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
REQUIRED: Any = {"tools": [OPENAI_TOOL], "tool_choice": "required"}
RESPONSE: Any = {"model": SERVER.model, "input": QUESTION, "max_output_tokens": TOKENS, "temperature": 0}


@use("models")
def models() -> None:
    equal([model.id for model in client.models.list()], [SERVER.model])
    equal(client.models.retrieve(SERVER.model).id, SERVER.model)


@use("completion")
def completion() -> None:
    same_text(client.completions.create(**TEXT).choices[0].text, SERVER.completion)


@use("completion, streamed")
def completion_streamed() -> None:
    joined([event.choices[0].text for event in client.completions.create(**TEXT, stream=True)], SERVER.completion)


@use("logprobs")
def logprobs() -> None:
    found = client.completions.create(**TEXT, logprobs=2).choices[0].logprobs
    assert found is not None
    same_text("".join(found.tokens or []), SERVER.completion)


@use("chat")
def chat() -> None:
    same_text(client.chat.completions.create(**CHAT).choices[0].message.content, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    events = list(client.chat.completions.create(**CHAT, stream=True, stream_options={"include_usage": True}))
    joined([event.choices[0].delta.content for event in events if event.choices], SERVER.answer)
    equal(events[-1].usage.completion_tokens > 0, True)


@use("tools")
def tools() -> None:
    message = client.chat.completions.create(**CHAT, **REQUIRED).choices[0].message
    call: Any = message.tool_calls[0] if message.tool_calls else None
    called(call.function.name, call.function.arguments)


@use("tools, streamed")
def tools_streamed() -> None:
    with client.chat.completions.stream(**CHAT, **REQUIRED) as stream:
        message = stream.get_final_completion().choices[0].message
    call = (message.tool_calls or [])[0]
    called(call.function.name, call.function.arguments)


@use("tool results")
def tool_results() -> None:
    """A conversation with a call and its result is accepted and answered by text."""
    message = client.chat.completions.create(**CHAT, **REQUIRED).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "warm"}
    again = client.chat.completions.create(**CHAT | {"messages": [*MESSAGES, message, result]}, tools=[OPENAI_TOOL])
    equal(again.choices[0].message.role, "assistant")


@use("JSON schema")
def json_schema() -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    weather(client.chat.completions.create(**CHAT, response_format=schema).choices[0].message.content)


@use("parse")
def parse() -> None:
    weather(client.chat.completions.parse(**CHAT, response_format=Weather).choices[0].message.parsed)


@use("responses")
def responses() -> None:
    same_text(client.responses.create(**RESPONSE).output_text, SERVER.answer)


@use("responses, streamed")
def responses_streamed() -> None:
    with client.responses.stream(**RESPONSE) as stream:
        joined([event.delta for event in stream if event.type == "response.output_text.delta"], SERVER.answer)


@use("responses, tools")
def responses_tools() -> None:
    tool = {"type": "function", "strict": True, **OPENAI_TOOL["function"]}
    response = client.responses.create(**RESPONSE, tools=[tool], tool_choice="required")
    (call,) = [item for item in response.output if item.type == "function_call"]
    called(call.name, call.arguments)


@use("responses, parse")
def responses_parse() -> None:
    weather(client.responses.parse(**RESPONSE, text_format=Weather).output_parsed)


@use("errors")
def errors() -> None:
    """An unknown model and a wrong value raise the client's own exceptions."""
    for wrong, kind in (({"model": "none"}, openai.NotFoundError), ({"temperature": -1}, openai.BadRequestError)):
        try:
            client.chat.completions.create(**CHAT | wrong)
        except kind as error:
            print(error)
        else:
            raise AssertionError(f"{wrong} was accepted")
