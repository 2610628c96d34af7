"""Instructor: structured answers by tools, JSON schemas and responses."""

from __future__ import annotations

from typing import Any

import instructor
import openai

from tests.clients.checks.uses import QUESTION, TOKENS, server, use, weather
from tests.clients.checks.weather import Weather

SERVER = server()
CHAT: Any = {"model": SERVER.model, "messages": [{"role": "user", "content": QUESTION}], "max_retries": 0}


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=SERVER.base, api_key=SERVER.key, max_retries=0), mode=mode)


@use("tools")
def tools() -> None:
    weather(client(instructor.Mode.TOOLS).chat.completions.create(**CHAT, response_model=Weather, max_tokens=TOKENS))


@use("strict tools")
def strict_tools() -> None:
    made = client(instructor.Mode.TOOLS_STRICT)
    weather(made.chat.completions.create(**CHAT, response_model=Weather, max_tokens=TOKENS))


@use("JSON schema")
def json_schema() -> None:
    made = client(instructor.Mode.JSON_SCHEMA)
    weather(made.chat.completions.create(**CHAT, response_model=Weather, max_tokens=TOKENS))


@use("partial answers, streamed")
def partial() -> None:
    made = client(instructor.Mode.TOOLS).chat.completions
    weather(list(made.create_partial(**CHAT, response_model=Weather, max_tokens=TOKENS))[-1])


@use("responses")
def responses() -> None:
    made = client(instructor.Mode.RESPONSES_TOOLS)
    weather(made.responses.create(input=QUESTION, model=SERVER.model, response_model=Weather, max_retries=0))
