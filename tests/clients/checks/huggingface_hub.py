"""Hugging Face's InferenceClient."""

from __future__ import annotations

import os
from typing import Any

os.environ.pop("HF_HUB_OFFLINE", None)  # with it, the client calls no server at all

from huggingface_hub import InferenceClient

from tests.clients.checks.uses import (
    OPENAI_TOOL,
    QUESTION,
    TOKENS,
    WEATHER,
    called,
    joined,
    same_text,
    server,
    use,
    weather,
)

SERVER = server()
client: Any = InferenceClient(base_url=SERVER.base, api_key=SERVER.key)
CHAT: Any = {
    "model": SERVER.model,
    "messages": [{"role": "user", "content": QUESTION}],
    "max_tokens": TOKENS,
    "temperature": 0,
}


@use("chat")
def chat() -> None:
    same_text(client.chat_completion(**CHAT).choices[0].message.content, SERVER.answer)


@use("chat, streamed")
def chat_streamed() -> None:
    events = client.chat_completion(**CHAT, stream=True)
    joined([event.choices[0].delta.content for event in events if event.choices], SERVER.answer)


@use("tools")
def tools() -> None:
    answer: Any = client.chat_completion(**CHAT, tools=[OPENAI_TOOL], tool_choice="required")
    (call,) = answer.choices[0].message.tool_calls
    called(call.function.name, call.function.arguments)


@use("JSON schema, in the form of TGI")
def tgi_schema() -> None:
    answer: Any = client.chat_completion(**CHAT, response_format={"type": "json", "value": WEATHER})
    weather(answer.choices[0].message.content)


@use("JSON schema")
def json_schema() -> None:
    schema: Any = {"type": "json_schema", "json_schema": {"name": "weather", "schema": WEATHER, "strict": True}}
    weather(client.chat_completion(**CHAT, response_format=schema).choices[0].message.content)
