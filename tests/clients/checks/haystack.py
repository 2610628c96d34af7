"""Haystack: its generators for chats and responses."""

from __future__ import annotations

import os
from typing import Any

os.environ["HAYSTACK_TELEMETRY_ENABLED"] = "False"

from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import Tool
from haystack.utils import Secret

from tests.clients.checks.uses import (
    ARGUMENTS,
    QUESTION,
    TOKENS,
    TOOL,
    TOOL_ABOUT,
    WEATHER,
    called,
    joined,
    same_text,
    server,
    use,
    weather,
)

SERVER = server()
WHERE: Any = {"model": SERVER.model, "api_base_url": SERVER.base, "api_key": Secret.from_token(SERVER.key)}
SETTINGS: Any = {"temperature": 0, "max_completion_tokens": TOKENS}
MESSAGES = [ChatMessage.from_user(QUESTION)]


def reply(generator: Any) -> Any:
    return generator.run(MESSAGES)["replies"][0]


@use("chat")
def chat() -> None:
    same_text(reply(OpenAIChatGenerator(**WHERE, generation_kwargs=SETTINGS)).text, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    pieces: list[str] = []
    reply(
        OpenAIChatGenerator(
            **WHERE, generation_kwargs=SETTINGS, streaming_callback=lambda chunk: pieces.append(chunk.content)
        )
    )
    joined(pieces, SERVER.answer)


@use("tools")
def tools() -> None:
    tool = Tool(name=TOOL, description=TOOL_ABOUT, parameters=ARGUMENTS, function=lambda city: f"warm in {city}")
    generator = OpenAIChatGenerator(**WHERE, generation_kwargs=SETTINGS | {"tool_choice": "required"}, tools=[tool])
    (call,) = reply(generator).tool_calls
    called(call.tool_name, call.arguments)


@use("JSON schema")
def json_schema() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    weather(reply(OpenAIChatGenerator(**WHERE, generation_kwargs=SETTINGS | {"response_format": schema})).text)


@use("responses")
def responses() -> None:
    settings = {"temperature": 0, "max_output_tokens": TOKENS}
    same_text(reply(OpenAIResponsesChatGenerator(**WHERE, generation_kwargs=settings)).text, SERVER.answer)
