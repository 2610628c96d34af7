"""LangChain with its integration for Anthropic."""

from __future__ import annotations

from typing import Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool

from tests.clients.checks.uses import QUESTION, TOKENS, called, joined, same_text, server, use

SERVER = server()
model = ChatAnthropic(
    base_url=SERVER.url, api_key=SERVER.key, model=SERVER.model, temperature=0, max_tokens=TOKENS, max_retries=0
)


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """Return the weather in a city."""
    return f"It is warm in {city}."


@use("messages")
def messages() -> None:
    same_text(model.invoke(QUESTION).text, SERVER.answer)


@use("messages, streamed")
def streamed() -> None:
    joined([chunk.text for chunk in model.stream(QUESTION)], SERVER.answer)


@use("tools")
def tools() -> None:
    (call,) = model.bind_tools([get_weather], tool_choice="any").invoke(QUESTION).tool_calls
    called(call["name"], call["args"])
